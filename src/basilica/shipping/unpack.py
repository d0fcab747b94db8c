"""The receipt, the check and the unpacking of a directory as tar.gz.

The same rules serve the server, and the entrypoint of a rank in an image that has nothing but Python.
"""

import asyncio
import copy
import gzip
import hashlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from basilica.core.errors import ValidationError
from basilica.machine import files

UNPACKED_BYTES_MAX = 16 << 30
ENTRIES_MAX = 1_000_000
NAMES_BYTES_MAX = 64 << 20  # of all entries together: they are in memory while an archive is read
NAME_BYTES_MAX = 255  # of one file or directory: the limit of file systems
PATH_BYTES_MAX = 2048  # the kernel's limit is 4096, with the directory that the archive is unpacked into
LEVELS_MAX = 128
HEADER_BYTES_MAX = 1 << 20
WRITE_AT_ONCE = 1 << 20

Kind = Literal["file", "directory", "link"]


class BrokenArchive(Exception):
    """The archive cannot be unpacked; the message has the reason."""


class UnsafeEntry(Exception):
    """An entry of an archive that would reach beyond its directory, or that no file system can hold."""


class Abandoned(Exception):
    """The check or the unpacking was cancelled."""


@dataclass(frozen=True, slots=True)
class Received:
    digest: str
    bytes: int


async def receive(chunks: AsyncIterator[bytes], draft: Path, *, most: int | None = None) -> Received:
    """Write all chunks to the file. Beyond `most` bytes, the rest is read and not written.

    The sender is not cut off in the middle, and so can read the reason of the refusal.
    """
    digest, size = hashlib.sha256(), 0
    with draft.open("wb") as file:
        waiting = bytearray()

        async def write() -> None:
            if most is None or size <= most:
                await asyncio.to_thread(_write, file.fileno(), digest, bytes(waiting))
            waiting.clear()

        async for chunk in chunks:
            waiting += chunk
            size += len(chunk)
            if len(waiting) >= WRITE_AT_ONCE:
                await write()
        await write()
    return Received(digest.hexdigest(), size)


def _write(fd: int, digest: "hashlib._Hash", data: bytes) -> None:
    digest.update(data)
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def never() -> bool:
    return False


def check(path: Path, abandoned: Callable[[], bool] = never) -> None:
    """Check an archive: `ValidationError` unless every entry stays inside its directory, and all of them fit.

    `Abandoned` soon after `abandoned` returns True.
    """
    contents = Contents()
    place = path.parent / "unpacked"
    try:
        with path.open("rb") as file, _opened(file, abandoned) as archive:
            for member in _members(archive):
                contents.add(member)
                harmless(member, place)
    except UnsafeEntry as error:
        raise ValidationError("archive", f"{contents.entries} entries", str(error)[:300]) from None
    except _UNREADABLE as error:
        raise ValidationError("archive", f"{path.stat().st_size} bytes", f"is no tar.gz: {error}") from None


def unpack(file: IO[bytes], target: Path, abandoned: Callable[[], bool] = never) -> None:
    """Create the directory atomically; an existing one is not changed.

    `BrokenArchive` if the file is no tar.gz or does not pass the check, `OSError` if the file system refuses it, and
    `Abandoned` soon after `abandoned` returns True.
    """
    if target.is_dir():
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(os.path.realpath(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}-")))
    contents = Contents()
    try:
        with _opened(file, abandoned) as archive:
            for member in _members(archive):
                contents.add(member)
                safe = harmless(member, draft)
                if safe.name:  # else the directory itself
                    archive.extract(safe, draft)
        draft.rename(target)
    except (UnsafeEntry, *_UNREADABLE) as error:
        raise BrokenArchive(str(error)) from error
    finally:
        with suppress(OSError):
            files.remove_tree(str(draft))


# The errors of reading bytes that are no tar.gz. `OSError` is not one of them: it is the disk's.
_UNREADABLE = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ValueError, OverflowError, IndexError)


@contextmanager
def _opened(file: IO[bytes], abandoned: Callable[[], bool]) -> Iterator[tarfile.TarFile]:
    with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:
        bounded = _Bounded(unzipped, abandoned)
        with tarfile.open(fileobj=bounded, mode="r:") as archive:  # type: ignore[call-overload]
            yield archive


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the entries one by one, without the list that `tarfile` keeps of them: a million take a gigabyte."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]
        yield member


class _Bounded:
    """The subset of a file that `tarfile` uses. No header can make it read more at once than the size of headers."""

    def __init__(self, file: gzip.GzipFile, abandoned: Callable[[], bool]) -> None:
        self._file, self._abandoned = file, abandoned
        self.tell = file.tell

    def read(self, size: int = -1) -> bytes:
        if self._abandoned():
            raise Abandoned
        if not 0 <= size <= HEADER_BYTES_MAX:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek forward by reading, so that it ends soon after a cancellation."""
        if whence != os.SEEK_SET or offset < 0:
            raise tarfile.ReadError(f"an entry at {offset} bytes")
        while (left := offset - self._file.tell()) > 0:
            if not self.read(min(left, WRITE_AT_ONCE)):
                break
        return self._file.seek(offset)


@dataclass(slots=True)
class Contents:
    """The entries of an archive so far, each checked when it is added: `UnsafeEntry` for one that does not fit."""

    entries: int = 0
    _bytes: int = 0
    _names: int = 0
    _kinds: dict[str, Kind] = field(default_factory=dict)

    def add(self, member: tarfile.TarInfo) -> None:
        name = path_of(member)
        kind = _kind_of(member)
        self._count(member, name)
        if not name:
            return  # the directory itself
        shown = _shown(member.name)
        above = name
        while above := above.rpartition("/")[0]:
            found = self._kinds.setdefault(above, "directory")
            if found != "directory":
                raise UnsafeEntry(f"{shown} is below {_shown(above)}, which is a {found} in the same archive")
        before = self._kinds.setdefault(name, kind)
        if before != kind:
            raise UnsafeEntry(f"{shown} is both a {before} and a {kind}")
        if member.islnk() and self._kinds.get(_normal(member.linkname)) != "file":
            raise UnsafeEntry(f"{shown} is a hard link to {_shown(member.linkname)}, which is no file before it")

    def _count(self, member: tarfile.TarInfo, name: str) -> None:
        if member.size < 0:
            raise UnsafeEntry(f"{_shown(member.name)} has {member.size} bytes")
        self.entries += 1
        self._bytes += member.size
        self._names += len(os.fsencode(name))
        if self._bytes > UNPACKED_BYTES_MAX or self.entries > ENTRIES_MAX:
            raise UnsafeEntry(f"holds more than {UNPACKED_BYTES_MAX} bytes or {ENTRIES_MAX} entries")
        if self._names > NAMES_BYTES_MAX:
            raise UnsafeEntry(f"the names of its entries have more than {NAMES_BYTES_MAX} bytes")


def path_of(member: tarfile.TarInfo) -> str:
    """Return the path of an entry in its directory, empty for the directory itself. `UnsafeEntry` for invalid paths."""
    shown = _shown(member.name)
    name = _normal(member.name)
    if not name and (not member.isdir() or not member.name.strip("/")):
        raise UnsafeEntry(f"an entry has no name ({shown})")
    if ".." in name.split("/"):
        raise UnsafeEntry(f"{shown} would reach beyond its directory: it has '..' in it")
    for text in (name, member.linkname):
        if "\0" in text:
            raise UnsafeEntry(f"{shown} has a zero byte in its name")
        try:
            encoded = os.fsencode(text)
        except UnicodeEncodeError:
            raise UnsafeEntry(f"{shown} has a name that is no text") from None
        if any(len(part) > NAME_BYTES_MAX for part in encoded.split(b"/")):
            raise UnsafeEntry(f"{shown} has a name of more than {NAME_BYTES_MAX} bytes")
        if len(encoded) > PATH_BYTES_MAX:
            raise UnsafeEntry(f"{shown} has a path of {len(encoded)} bytes, and {PATH_BYTES_MAX} can be unpacked")
    if name.count("/") >= LEVELS_MAX:
        raise UnsafeEntry(f"{shown} is more than {LEVELS_MAX} levels deep")
    if member.issym() and not member.linkname:
        raise UnsafeEntry(f"{shown} is a link to nothing")
    return name


def _normal(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _kind_of(member: tarfile.TarInfo) -> Kind:
    if member.isreg():
        return "file"
    if member.islnk():
        return "file"
    if member.isdir():
        return "directory"
    if member.issym():
        return "link"
    raise UnsafeEntry(f"{_shown(member.name)} is a special file")


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 60 else f"{name[:40]!r}… ({len(name)} letters)"


def harmless(member: tarfile.TarInfo, place: Path) -> tarfile.TarInfo:
    """Return the entry as it may be unpacked below `place`: owned by us, and no special file. Else `UnsafeEntry`.

    It does the work of `tarfile.data_filter`, which Python has since 3.11.4 and Debian's 3.11 has not.
    """
    _kind_of(member)
    name = path_of(member)
    _check_inside(place, name, member.name)
    if member.issym() or member.islnk():
        if os.path.isabs(member.linkname):
            raise UnsafeEntry(f"{member.name!r} is a link to an absolute path")
        start = os.path.dirname(name) if member.issym() else ""
        _check_inside(place, os.path.join(start, member.linkname), member.name)
    safe = copy.copy(member)
    safe.name = name
    safe.uid, safe.gid, safe.uname, safe.gname = os.geteuid(), os.getegid(), "", ""
    safe.mode = 0o755 if member.isdir() else (member.mode & 0o755) | 0o600
    return safe


def _check_inside(place: Path, path: str, name: str) -> None:
    """Refuse a path that leads outside `place`, by existing links too."""
    root = os.path.realpath(place)
    found = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, found]) != root:
        raise UnsafeEntry(f"{name!r} would reach beyond its directory")
