"""A Python in which python-etcd is not installed, made of one in which it is."""

import os
from pathlib import Path

HIDES_IT = """
import sys
from importlib.machinery import PathFinder

class WithoutEtcd(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "etcd" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutEtcd
"""


def without_python_etcd(folder: Path, *path: Path) -> dict[str, str]:
    """Variables for such a process, with `path` before what it can import; `folder` is made."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDES_IT)
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, *path))), "PYTHONWARNINGS": "ignore"}
