"""Directories that users sent: kept as they came, looked through before they are believed, unpacked once per run."""

import asyncio
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from pathlib import Path

from basilica.core.errors import RuntimeUnavailable, ValidationError
from basilica.ports import StoredArchive

UNPACKED_BYTES_MAX = 16 << 30
ENTRIES_MAX = 1_000_000
WRITE_AT_ONCE = 1 << 20
SUFFIX = ".tar.gz"


class Archives:
    """`<root>/<user>/<sha256>.tar.gz`; the time of the file is when somebody last wanted it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def store(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        directory = self._root / user
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=directory, prefix="draft-")
        draft = Path(name)
        try:
            digest, size = hashlib.sha256(), 0
            with os.fdopen(fd, "wb") as file:
                waiting = bytearray()
                async for chunk in chunks:
                    waiting += chunk
                    if len(waiting) >= WRITE_AT_ONCE:
                        size += await asyncio.to_thread(_write, file.fileno(), digest, bytes(waiting))
                        waiting.clear()
                size += await asyncio.to_thread(_write, file.fileno(), digest, bytes(waiting))
            await asyncio.to_thread(check, draft)
            os.replace(draft, self._path(user, digest.hexdigest()))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
        return StoredArchive(digest.hexdigest(), size)

    def has(self, user: str, digest: str) -> bool:
        try:
            os.utime(self._path(user, digest))
        except FileNotFoundError:
            return False
        return True

    def old(self, before: float) -> list[Path]:
        """Also what an upload left that never ended."""
        found = []
        for path in self._root.glob("*/*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    found.append(path)
        return found

    def forget(self, in_use: Collection[tuple[str, str]], before: float) -> list[str]:
        """Looks at their age once more: one that a new run has just asked for is not old any more."""
        forgotten = []
        for path in self.old(before):
            digest = path.name.removesuffix(SUFFIX)
            if (path.parent.name, digest) not in in_use:
                path.unlink(missing_ok=True)
                forgotten.append(digest)
        return forgotten

    def unpack(self, user: str, digest: str, target: Path) -> None:
        """Make the directory, whole or not at all; if it is there, leave it alone."""
        if target.is_dir():
            return
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}-"))
        try:
            with tarfile.open(self._path(user, digest), "r:gz") as archive:
                archive.extractall(draft, filter="data")
            draft.rename(target)
        except FileNotFoundError as error:
            raise RuntimeUnavailable(f"the archive {digest[:12]} is not there any more") from error
        except (tarfile.TarError, zlib.error, EOFError) as error:
            raise RuntimeUnavailable(f"the archive {digest[:12]} cannot be unpacked: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _path(self, user: str, digest: str) -> Path:
        return self._root / user / f"{digest}{SUFFIX}"


def check(path: Path) -> None:
    """`ValidationError` unless every entry can be unpacked without leaving its directory, and all of them fit."""
    size, entries = 0, 0
    place = str(path.parent / "unpacked")
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                tarfile.data_filter(member, place)
                size, entries = size + member.size, entries + 1
                if size > UNPACKED_BYTES_MAX or entries > ENTRIES_MAX:
                    limit = f"{UNPACKED_BYTES_MAX} bytes or {ENTRIES_MAX} entries"
                    raise ValidationError("archive", f"{entries} entries", f"holds more than {limit}")
    except tarfile.FilterError as error:
        raise ValidationError("archive", str(error.tarinfo.name)[:80], str(error)[:200]) from None
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:  # gzip raises OSError for what is none
        raise ValidationError("archive", f"{path.stat().st_size} bytes", f"is no tar.gz: {error}") from None


def _write(fd: int, digest: "hashlib._Hash", data: bytes) -> int:
    digest.update(data)
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    return len(data)
