"""A disk of a few megabytes, for tests of what happens when it is full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DISK_BYTES = 4 << 20


@contextmanager
def small_disk(directory: Path, free: int) -> Iterator[Path]:
    """A disk of 4 MB on which so many bytes are free; the ballast is what to remove."""
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        ballast = directory / "ballast"
        ballast.write_bytes(bytes(DISK_BYTES - free))
        yield ballast
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(path: Path) -> None:
    """Write until there is no space left, to the last block."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
