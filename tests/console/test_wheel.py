"""What is in the wheels: the page, with nothing to build, and no test cluster, which is a wheel of its own."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import kubernetes_validate
import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
ALONE = """
import importlib.util

from basilica_testkube import KubeServer

assert importlib.util.find_spec("basilica") is None
container = {"name": "main", "image": "any", "command": ["true"]}
spec = {"restartPolicy": "Never", "containers": [container]}
with KubeServer() as kube:
    kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec})
    kube.wait_for(lambda: kube.pods()[0]["status"].get("phase") == "Succeeded")
    print("Succeeded")
"""


def built(project: Path, folder: Path) -> zipfile.ZipFile:
    """The wheel of a project, built from a copy of what is its own."""
    tree = folder / "tree"
    shutil.copytree(project / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, tree)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=tree, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(ROOT, tmp_path_factory.mktemp("basilica"))


def tops(wheel: zipfile.ZipFile) -> set[str]:
    """What the wheel puts into site-packages."""
    return {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}


def requirements(wheel: zipfile.ZipFile) -> list[str]:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    lines = wheel.read(name).decode().splitlines()
    return [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]


def test_the_wheel_has_every_file_of_the_page(ours: zipfile.ZipFile) -> None:
    names = set(ours.namelist())
    page = ROOT / "src/basilica/server/console"
    assert {f"basilica/server/console/{path.name}" for path in page.iterdir()} <= names
    assert not [name for name in names if "axe" in name.lower() or "playwright" in name.lower()]


def test_the_wheel_has_no_test_cluster(ours: zipfile.ZipFile) -> None:
    assert tops(ours) == {"basilica"}
    assert [name for name in ours.namelist() if name.startswith("basilica/testing/kube")] == [
        "basilica/testing/kube.py"
    ]
    needed = [line for line in requirements(ours) if line.startswith(("basilica", "kubernetes-validate"))]
    assert needed
    assert all(line.endswith('extra == "dev"') for line in needed), "it is needed only to work on Basilica"


def test_who_imports_the_test_cluster_from_its_old_place_is_told_the_new_one() -> None:
    code = "from basilica.testing.kube import KubeServer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "pip install basilica-testkube" in done.stderr
    assert "basilica_testkube" in done.stderr


def test_the_wheel_of_the_test_cluster_works_without_basilica(tmp_path: Path) -> None:
    wheel = built(ROOT / "packages/basilica-testkube", tmp_path)
    assert tops(wheel) == {"basilica_testkube"}
    assert "basilica_testkube/py.typed" in wheel.namelist()
    assert not [line for line in requirements(wheel) if line.startswith("basilica")]
    wheel.extractall(tmp_path / "site")
    others = Path(kubernetes_validate.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", ALONE],  # -S: what is installed in place, as Basilica is, is not found
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}/site:{others}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "Succeeded\n"), done.stderr
