"""Objects as files below a directory that all replicas see: a shared disk, or memory (`/dev/shm`) on one machine.

A file is written without a name and then linked to its own, which succeeds for exactly one of several writers; so it is
there whole or not at all. Nothing is forced to disk: after a power cut a file may be torn, and its checksums tell.
Readers read straight into the memory where the numbers belong.
"""

import errno
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from basilica.diloco.effects import Found, Range

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class FileStore:
    first_pause = 0.0005
    longest_pause = 0.02
    piece_bytes = 1 << 20
    parallel = 1

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/") or "/"

    def put(self, key: str, size: int, buffers: Iterable[memoryview]) -> None:
        path = self._path(key)
        with self._named(path) as (fd, temporary):
            _write(fd, buffers)
            os.replace(temporary, path)

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        path = self._path(key)
        if os.path.exists(path):
            return False
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_WRONLY, 0o644)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
            with self._named(path) as (fd, temporary):
                _write(fd, buffers)
                return _link(temporary, path)
        try:
            _write(fd, buffers)
            # With a directory (which an absolute path ignores) the link is followed to the unnamed file itself.
            return _link(f"/proc/self/fd/{fd}", path, directory=fd)
        finally:
            os.close(fd)

    def read(self, range: Range) -> memoryview | None:
        try:
            fd = os.open(self._path(range.key), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            into = memoryview(bytearray(range.length)) if range.into is None else range.into
            done = 0
            while done < len(into):
                got = os.preadv(fd, [into[done:]], range.start + done)
                if not got:
                    break
                done += got
            return into[:done]
        finally:
            os.close(fd)

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        directory = prefix.rpartition("/")[0]
        found = [f for f in self._files(directory, after) if f.key.startswith(prefix) and f.key > after]
        return tuple(sorted(found, key=lambda f: f.key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            with suppress(FileNotFoundError):
                os.unlink(path)
            with suppress(OSError):
                os.rmdir(os.path.dirname(path))

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        time.sleep(seconds)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _named(self, path: str) -> Iterator[tuple[int, str]]:
        """A new file beside `path` under a name that no listing shows."""
        directory = os.path.dirname(path)
        os.makedirs(directory, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=".", dir=directory)
        try:
            yield fd, temporary
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _files(self, directory: str, after: str) -> Iterator[Found]:
        try:
            entries = list(os.scandir(self._path(directory) if directory else self._root))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = f"{directory}/{entry.name}" if directory else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                # Nothing below a directory that lies wholly before `after` can be wanted.
                if f"{key}/\U0010ffff" > after:
                    yield from self._files(key, after)
            else:
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    yield Found(key, entry.stat().st_size)


def _write(fd: int, buffers: Iterable[memoryview]) -> None:
    for buffer in buffers:
        rest = buffer
        while rest:
            rest = rest[os.write(fd, rest) :]


def _link(source: str, path: str, directory: int | None = None) -> bool:
    try:
        os.link(source, path, src_dir_fd=directory, follow_symlinks=True)
    except FileExistsError:
        return False
    return True
