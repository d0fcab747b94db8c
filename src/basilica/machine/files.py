"""Safe access to files that another user can write: a rank's log, report, result, record, work directory.

The owner of such a file is hostile, by accident or not. The file may be a FIFO, a device, a socket, a directory, a link
to `/dev/zero` or to a secret, a terabyte of zeros, or grow while it is read; a directory in its path may be a link.

Every path here is canonical and absolute: no part of it may be a symbolic link, so the owner of the root resolves it
once. A file is opened without following links and without waiting, must be a regular file, and is read with a bound.
Any other file raises `UnusableFile`, which names the file and its problem; `FileNotFoundError` is passed through.

These calls wait for the disk: an event loop makes them in a thread (see `machine.pools`).
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from basilica.machine.proc import SAFELY

ENTRIES_MAX = 100_000
_READ_ONCE = 1 << 20
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_NUMBERS = {stat.S_IFDIR: errno.EISDIR, stat.S_IFLNK: errno.ELOOP}


class UnusableFile(OSError):
    """A file of a wrong kind, or one that cannot be read; `problem` describes it, `path` names the file."""

    def __init__(self, path: str, problem: str, number: int = errno.EINVAL) -> None:
        super().__init__(number, problem, path)
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[type, tuple[str, str, int | None]]:
        return type(self), (self.path, self.problem, self.errno)

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


def kind_of(mode: int) -> str:
    """Return the kind of a file with that mode, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "no file of a known kind")


# ---- reading -------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a regular file and yield its descriptor. A disk error while it is used is an `UnusableFile` as well.

    `flags` are those of `os.open`.
    """
    with _parent(path) as (parent, name):
        fd = _open(path, parent, name, flags)
    try:
        yield fd
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        os.close(fd)


def read(path: str, limit: int) -> bytes:
    """Read the whole file; one with more bytes than `limit` is an `UnusableFile`, and no more of it is read."""
    with opened(path) as fd:
        data = read_at(fd, 0, limit + 1)
    if len(data) > limit:
        raise UnusableFile(path, f"has more than {limit} bytes", errno.EFBIG)
    return data


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read up to `size` bytes from the offset; fewer only where the file ends."""
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(fd, min(size, _READ_ONCE), offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def names(path: str, limit: int | None = ENTRIES_MAX, keep: Callable[[str], bool] = bool) -> list[str]:
    """Return the names in a directory that `keep` accepts; one with more than `limit` of them is an `UnusableFile`."""
    found: list[str] = []
    with directory(path, os.O_RDONLY) as fd:
        try:
            with os.scandir(fd) as entries:
                for name in filter(keep, (entry.name for entry in entries)):
                    if len(found) == limit:
                        raise UnusableFile(path, f"has more than {limit} entries", errno.EFBIG)
                    found.append(name)
        except OSError as error:
            raise _unusable(path, error) from error
    return found


def kind(path: str) -> str | None:
    """Return the kind of the file, in words; None if there is none."""
    try:
        with _parent(path) as (parent, name):
            return kind_of(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def exists(path: str) -> bool:
    """Whether there is a file of any kind, a dangling link included."""
    return kind(path) is not None


@contextmanager
def directory(path: str, mode: int = _PATH_ONLY) -> Iterator[int]:
    """Yield a descriptor of the directory, opened without following a link: for calls that take a `dir_fd`."""
    fd = os.open("/", _DIRECTORY | _PATH_ONLY)
    try:
        parts = [part for part in path.split("/") if part]
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            try:
                below = os.open(part, _DIRECTORY | (mode if last else _PATH_ONLY), dir_fd=fd)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise _no_directory("/" + "/".join(parts[: number + 1]), fd, part, error) from error
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    above, _, name = path.rpartition("/")
    if not path.startswith("/") or name in ("", ".", ".."):
        raise ValueError(f"not a canonical path of a file: {path!r}")
    with directory(above) as fd:
        yield fd, name


def _open(path: str, parent: int, name: str, flags: int) -> int:
    """Open the file, checked before, since opening a device can have effects, and after, since that may race."""
    try:
        _check(path, parent, os.stat(name, dir_fd=parent, follow_symlinks=False))
        fd = os.open(name, flags | SAFELY, dir_fd=parent)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _check(path, parent, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: str, parent: int, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        number = _NUMBERS.get(stat.S_IFMT(found.st_mode), errno.ENXIO)
        raise UnusableFile(path, f"is {kind_of(found.st_mode)}, not a regular file", number)
    # A user can link to a file that he must not read, to have this process read it for him.
    if found.st_nlink > 1 and found.st_uid != os.fstat(parent).st_uid:
        raise UnusableFile(path, "is a hard link to a file of another user", errno.EPERM)


def _unusable(path: str, error: OSError) -> OSError:
    """Return the error with the name of the file; `FileNotFoundError` and `UnusableFile` are returned as they are."""
    if isinstance(error, FileNotFoundError | UnusableFile):
        return error
    if isinstance(error, BlockingIOError):
        return UnusableFile(path, "is held by a lease of another process", errno.EAGAIN)
    return UnusableFile(path, f"cannot be used: {error.strerror or error}", error.errno or errno.EIO)


def _no_directory(path: str, parent: int, name: str, error: OSError) -> OSError:
    with suppress(OSError):
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            return UnusableFile(path, f"is {kind_of(mode)}, not a directory", errno.ENOTDIR)
    return _unusable(path, error)


# ---- writing and removing ------------------------------------------------------------------------------------------


def write(path: str, data: bytes) -> None:
    """Write the file atomically, under that name only; a directory that has the name is put aside."""
    with _parent(path) as (parent, name):
        draft = f".{name}.{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o600, dir_fd=parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            try:
                os.replace(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
            except IsADirectoryError:
                _put_aside(parent, name)
                os.replace(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=parent)
            raise


@contextmanager
def appending(path: str) -> Iterator[int]:
    """Yield a descriptor to append to the file, made if missing; an unusable file of that name is put aside."""
    fd = _open_or_make(path, os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def in_place(path: str, mode: int = 0o600) -> Iterator[int]:
    """Yield a descriptor to overwrite the file, made with that mode if missing; an unusable one is put aside."""
    fd = _open_or_make(path, os.O_RDWR, mode)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:  # by the umask of this process, or by the owner
            with suppress(PermissionError):
                os.fchmod(fd, mode)
        yield fd
    finally:
        os.close(fd)


def _open_or_make(path: str, flags: int, mode: int) -> int:
    with _parent(path) as (parent, name):
        try:
            return _open(path, parent, name, flags)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _put_aside(parent, name)
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | SAFELY, mode, dir_fd=parent)


def make_directory(path: str) -> None:
    """Make the directory and its parents, unless they exist; another file of that name is put aside."""
    above = path.rpartition("/")[0]
    if above and kind(above) is None:
        make_directory(above)
    with _parent(path) as (parent, name):
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                _put_aside(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)


def remove(path: str) -> None:
    """Remove the file, or the directory with its content; a missing one is fine."""
    with suppress(FileNotFoundError):
        try:
            with _parent(path) as (parent, name):
                os.unlink(name, dir_fd=parent)
        except (IsADirectoryError, PermissionError):  # the error for a directory differs between systems
            remove_tree(path)


def remove_tree(path: str) -> None:
    """Remove a directory and its content, however deep it is. No link is followed.

    A directory that is not empty is moved up beside the first one, and emptied there. So neither the stack nor the
    number of descriptors nor the length of a path grows with the depth.
    """
    with _parent(path) as (parent, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=parent)
        left = [name]
        while left:
            emptied = left.pop()
            for below in _empty(parent, emptied):
                beside = f".{name[:64]}.{secrets.token_hex(8)}"
                os.rename(below, beside, src_dir_fd=parent, dst_dir_fd=parent)
                left.append(beside)
            os.rmdir(emptied, dir_fd=parent)


def _empty(parent: int, name: str) -> list[str]:
    """Remove all files and empty directories in a directory; return the others, relative to `parent`."""
    left: list[str] = []
    fd = os.open(name, _DIRECTORY | os.O_RDONLY, dir_fd=parent)
    try:
        for below in os.listdir(fd):
            try:
                os.unlink(below, dir_fd=fd)
            except (IsADirectoryError, PermissionError):
                os.chmod(below, 0o700, dir_fd=fd)
                try:
                    os.rmdir(below, dir_fd=fd)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    left.append(f"{name}/{below}")
    finally:
        os.close(fd)
    return left


def put_aside(path: str) -> None:
    """Rename the file or directory out of the way, at once, however large it is; a missing one is fine."""
    with suppress(FileNotFoundError), _parent(path) as (parent, name):
        _put_aside(parent, name)


def _put_aside(parent: int, name: str) -> None:
    os.rename(name, f".{name}.{secrets.token_hex(8)}", src_dir_fd=parent, dst_dir_fd=parent)
