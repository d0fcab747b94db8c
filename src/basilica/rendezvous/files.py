"""The files of keyspaces, which ranks of the service's own user can reach and replace: they are never trusted.

Every file is opened without following links and without blocking, must be a regular file, and is read with a bound. A
link, a FIFO, a device or a directory in the place of a file is an `OSError` as a missing permission is.
"""

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from basilica.machine.proc import SAFELY

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the machine, independent of the file


def is_shortage(error: BaseException | None) -> bool:
    """Whether the operation would have failed on any file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return True
        error = error.__cause__
    return False


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor of a regular file; `OSError` for anything else."""
    fd = os.open(path, flags | SAFELY, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file; `OSError` if it is none, or larger than `limit`."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, on disk when this returns."""
    draft = path.with_name(path.name + ".new")
    discard(draft)
    fd = open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    discard_directory(path)
    draft.replace(path)
    sync_folder(path.parent)


def discard(path: Path) -> None:
    """Remove the entry at `path`: a file, a link, a FIFO, or a directory with all below it."""
    with contextlib.suppress(FileNotFoundError):
        try:
            path.unlink()
        except IsADirectoryError:
            shutil.rmtree(path)


def discard_directory(path: Path) -> None:
    """Remove a directory in the place of a file, which no rename would replace."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def set_aside(path: Path, shelf: Path) -> Path:
    """Move the entry at `path` into the folder `shelf`, replacing one of that name; return its new path."""
    shelf.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = shelf / path.name
    discard(place)
    path.rename(place)
    return place


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
