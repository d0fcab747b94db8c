"""The contracts of pyproject.toml hold: a module without a floor and each wrong import fail `lint-imports`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRONG = {  # a planted module, what it imports, and the contract that it breaks
    "server/planted.py": ("basilica.stores.sqlite.store", "the floor plan"),
    "controller/planted.py": ("basilica.runtimes.local.runtime", "the floor plan"),
    "reports/planted.py": ("basilica.shipping.pack", "the floor plan"),
    "core/planted.py": ("os", "decisions are pure"),
    "runtimes/kubernetes/planted.py": ("basilica.runtimes.local.records", "runtimes are independent"),
    "stores/sqlite/planted.py": ("basilica.stores.kubernetes.codec", "stores are independent"),
    "kube/manifests/planted.py": ("basilica.kube.client.api", "manifests call nobody"),
    "rank/planted.py": ("basilica.runtimes.local.supervisor", "a rank knows no adapter"),
    "cli/planted.py": ("basilica.stores.sqlite.store", "only the wiring names adapters"),
    "machine/planted.py": ("httpx2", "nothing that has to be installed"),
    "mesh.py": ("basilica.core.mesh", "the mesh gate is copied"),
    "progress/notices.py": ("basilica.machine.files", "the mesh gate is copied"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src/basilica", tmp_path / "basilica", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "packages/basilica-testkube/src/basilica_testkube", tmp_path / "basilica_testkube")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(copy: Path) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "400"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_module_without_a_floor_is_refused(copy: Path) -> None:
    (copy / "basilica/planted.py").write_text('"""A module that nobody gave a floor."""\n')
    code, text = lint(copy)
    assert code == 1
    assert "planted" in text


def test_each_wrong_import_is_refused(copy: Path) -> None:
    for file, (imported, _) in WRONG.items():
        with (copy / "basilica" / file).open("a") as module:
            module.write(f"\nimport {imported}\n")
    code, text = lint(copy)
    assert code == 1
    broken = [line for line in text.splitlines() if line.endswith("BROKEN") or " BROKEN" in line]
    for file, (imported, contract) in WRONG.items():
        assert any(contract in line for line in broken), (file, contract, broken)
        importer = "basilica." + file.removesuffix(".py").replace("/", ".")
        assert any(importer in line and imported in line for line in text.splitlines()), (importer, imported)
