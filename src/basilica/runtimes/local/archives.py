"""Directories that users sent: kept as they came, looked through before they are believed, unpacked once per run."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from pathlib import Path

from basilica.archives import BrokenArchive, check, receive, unpack
from basilica.clocks import SteadyClock
from basilica.core.errors import RuntimeUnavailable
from basilica.ports import StoredArchive

SUFFIX = ".tar.gz"


class Archives:
    """`<root>/<user>/<sha256>.tar.gz`; the time of the file is when somebody last wanted it."""

    def __init__(self, root: Path, clock: SteadyClock) -> None:
        self._root, self._clock = root, clock

    async def store(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        directory = self._root / user
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=directory, prefix="draft-")
        os.close(fd)
        draft = Path(name)
        self._touch(draft)
        try:
            received = await receive(chunks, draft)
            await asyncio.to_thread(check, draft)
            self._touch(draft)
            os.replace(draft, self._path(user, received.digest))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
        return StoredArchive(received.digest, received.bytes)

    def has(self, user: str, digest: str) -> bool:
        try:
            self._touch(self._path(user, digest))
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
        try:
            with self._path(user, digest).open("rb") as file:
                unpack(file, target)
        except FileNotFoundError as error:
            raise RuntimeUnavailable(f"the archive {digest[:12]} is not there any more") from error
        except BrokenArchive as error:
            raise RuntimeUnavailable(f"the archive {digest[:12]} cannot be unpacked: {error}") from error

    def _touch(self, path: Path) -> None:
        """On our own time line: a step of the wall clock makes nothing old."""
        now = self._clock.now()
        os.utime(path, (now, now))

    def _path(self, user: str, digest: str) -> Path:
        return self._root / user / f"{digest}{SUFFIX}"
