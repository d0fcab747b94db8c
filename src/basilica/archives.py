"""Directories as tar.gz: how one is received, looked through before it is believed, and unpacked.

One rule for all who do it: the server, and the entrypoint of a rank in an image that has nothing but Python.
"""

import asyncio
import copy
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from basilica.core.errors import ValidationError

UNPACKED_BYTES_MAX = 16 << 30
ENTRIES_MAX = 1_000_000
WRITE_AT_ONCE = 1 << 20


class BrokenArchive(Exception):
    """It cannot be unpacked; the text says why."""


class UnsafeEntry(Exception):
    """An entry of an archive that would reach beyond its directory, or is none of a file, a directory and a link."""


@dataclass(frozen=True, slots=True)
class Received:
    digest: str
    bytes: int


async def receive(chunks: AsyncIterator[bytes], draft: Path, *, most: int | None = None) -> Received:
    """Write it all to the file. Of one that has more bytes than `most`, the rest is read and not written.

    Whoever sends it is not cut off in the middle, and so gets to read why it is refused.
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


def check(path: Path) -> None:
    """`ValidationError` unless every entry can be unpacked without leaving its directory, and all of them fit."""
    size, entries = 0, 0
    place = path.parent / "unpacked"
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                harmless(member, place)
                size, entries = size + member.size, entries + 1
                if size > UNPACKED_BYTES_MAX or entries > ENTRIES_MAX:
                    limit = f"{UNPACKED_BYTES_MAX} bytes or {ENTRIES_MAX} entries"
                    raise ValidationError("archive", f"{entries} entries", f"holds more than {limit}")
    except UnsafeEntry as error:
        raise ValidationError("archive", f"{entries} entries", str(error)[:200]) from None
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:  # gzip raises OSError for what is none
        raise ValidationError("archive", f"{path.stat().st_size} bytes", f"is no tar.gz: {error}") from None


def unpack(file: IO[bytes], target: Path) -> None:
    """Make the directory, whole or not at all; if it is there, leave it alone. `BrokenArchive` if it is no tar.gz."""
    if target.is_dir():
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}-"))
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                archive.extract(harmless(member, draft), draft)
        draft.rename(target)
    except (UnsafeEntry, tarfile.TarError, zlib.error, EOFError) as error:
        raise BrokenArchive(str(error)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def harmless(member: tarfile.TarInfo, place: Path) -> tarfile.TarInfo:
    """The entry as it may be unpacked below `place`: nobody's but ours, and no special file. Else `UnsafeEntry`.

    What `tarfile.data_filter` does, which Python has since 3.11.4 and Debian's 3.11 has not.
    """
    kind = member.isreg() or member.isdir() or member.issym() or member.islnk()
    if not kind:
        raise UnsafeEntry(f"{member.name!r} is a special file")
    name = member.name.lstrip("/")
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
    """Links that are there already are followed."""
    root = os.path.realpath(place)
    found = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, found]) != root:
        raise UnsafeEntry(f"{name!r} would reach beyond its directory")
