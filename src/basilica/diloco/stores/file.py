"""Objects as files in a directory that all replicas share: a shared disk, or memory (`/dev/shm`) on one machine.

A file is written without a name and then linked to its own, which succeeds for exactly one of several writers; so a
file is complete or absent. Nothing is synced to disk: after a power cut a file may be torn, and its checksums reveal
it. Readers read directly into the target memory of the numbers.

On file systems without unnamed files, and where a file replaces another, the writer uses a draft, a name that no
listing shows. It locks its draft as long as it lives; a killed writer leaves an unlocked draft behind.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from basilica.diloco.effects import Found, Range

DRAFT = ".basilica-draft-"
_MODE = 0o644
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
        with self._drafted(path) as (fd, draft):
            _write(fd, buffers, path)
            os.replace(draft, path)

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        path = self._path(key)
        if os.path.exists(path):
            return False
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_WRONLY, _MODE)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
            with self._drafted(path) as (fd, draft):
                _write(fd, buffers, path)
                return _link(draft, path)
        try:
            _write(fd, buffers, path)
            # With a directory (which an absolute path ignores) `os.link` follows the link to the unnamed file itself.
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

    def leftovers(self, prefix: str, older_than: float) -> tuple[Found, ...]:
        """Return the drafts below a directory without a write for so many seconds, and whose writer is dead."""
        found = []
        for directory, _, names in os.walk(self._path(prefix)):
            for name in names:
                path = f"{directory.rstrip('/')}/{name}"
                if name.startswith(DRAFT) and (size := _abandoned(path, older_than)) is not None:
                    found.append(Found(path.removeprefix(f"{self._root}/"), size))
        return tuple(sorted(found, key=lambda f: f.key))

    @contextmanager
    def _drafted(self, path: str) -> Iterator[tuple[int, str]]:
        """Create a locked draft beside `path`; remove it at the end."""
        directory = os.path.dirname(path)
        draft = f"{directory}/{DRAFT}{secrets.token_hex(8)}"
        os.makedirs(directory, exist_ok=True)
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE)
        try:
            with suppress(OSError):  # a file system without locks: its age alone shows whether it is in use
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, draft
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(draft)

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
                # A directory whose keys all sort before `after` is skipped.
                if f"{key}/\U0010ffff" > after:
                    yield from self._files(key, after)
            else:
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    yield Found(key, entry.stat().st_size)


def _write(fd: int, buffers: Iterable[memoryview], path: str) -> None:
    for buffer in buffers:
        rest = buffer
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except OSError as error:
                error.filename = path  # the error of a file without a name does not show which disk is full
                raise


def _link(source: str, path: str, directory: int | None = None) -> bool:
    while True:
        try:
            os.link(source, path, src_dir_fd=directory, follow_symlinks=True)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Deletion of the directory's last object removed the directory too, while we wrote a file without a name.
            if directory is None or os.path.isdir(os.path.dirname(path)):
                raise
            os.makedirs(os.path.dirname(path), exist_ok=True)
        else:
            return True


def _abandoned(path: str, older_than: float) -> int | None:
    """Return the size of a draft without a live writer; None if it has one, is too young, or is gone."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if time.time() - status.st_mtime < older_than:
            return None
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(fd)
    return status.st_size
