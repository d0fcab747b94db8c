"""Files that only their owner can read, whatever the umask, written atomically."""

import os
from pathlib import Path


def write_private(path: Path | str, data: bytes, *, durable: bool = False) -> None:
    """Replace the file. `durable`: it survives a power cut from now on."""
    draft = f"{path}.draft"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft, path)


def append_private(path: Path) -> int:
    """Open the file for appending, made if missing; return the descriptor."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
