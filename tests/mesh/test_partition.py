"""The gate across hosts that are network namespaces."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = ("unshare", "ip", "tc", "mount")


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason="needs namespaces: root and iproute2"
)
def test_a_partition_degrades_the_mesh_with_the_pair_that_fails_and_healed_it_is_ready(tmp_path: Path) -> None:
    told = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-m", "tests.mesh.partition", tmp_path / "state"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.endswith("done\n")
