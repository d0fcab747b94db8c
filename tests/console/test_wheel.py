"""The page comes with the package: whoever installs the wheel has it, with nothing to build."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def test_the_wheel_has_every_file_of_the_page(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=tree, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist())
    page = ROOT / "src/basilica/server/console"
    assert {f"basilica/server/console/{path.name}" for path in page.iterdir()} <= names
    assert not [name for name in names if "axe" in name.lower() or "playwright" in name.lower()]
