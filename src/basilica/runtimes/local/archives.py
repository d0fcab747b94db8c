"""Directories that users sent: kept as they came, looked through before they are believed, unpacked once per run.

To look through one and to unpack it takes minutes if somebody wants it to. So that is done by threads of its own, for
each user one after the other, and ends early when nobody wants it any more.
"""

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from basilica.machine import files
from basilica.machine.clocks import SteadyClock
from basilica.machine.pools import Pool
from basilica.ports import StoredArchive
from basilica.shipping.unpack import BrokenArchive, check, receive, unpack

SUFFIX = ".tar.gz"
SEND_AGAIN = "deploy the run again from its directory"


class CannotUnpack(Exception):
    """There is nothing that the run could run in; the text says why, and what to do."""


class Archives:
    """`<root>/<user>/<sha256>.tar.gz`; the time of the file is when somebody last wanted it."""

    def __init__(self, root: Path, pool: Pool, clock: SteadyClock) -> None:
        self._root, self._pool, self._clock = root, pool, clock
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def store(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        directory = self._root / user
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=directory, prefix="draft-")
        os.close(fd)
        draft = Path(name)
        self._touch(draft)
        try:
            received = await receive(chunks, draft)
            await self._in_turn(user, lambda abandoned: check(draft, abandoned))
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

    async def unpack(self, user: str, digest: str, target: Path) -> None:
        """Make the directory, whole or not at all; if it is there, leave it alone. `CannotUnpack` if it cannot be.

        Whoever is cancelled waits until the thread has stopped: then nobody writes there any more.
        """
        await self._in_turn(user, lambda abandoned: self._unpack(user, digest, target, abandoned))

    def _unpack(self, user: str, digest: str, target: Path, abandoned: Callable[[], bool]) -> None:
        if files.kind(str(target)) is not None:
            return  # as the last attempt left it
        try:
            for name in files.names(str(target.parent)):
                if name.startswith(f"{target.name}-"):  # an earlier server was about to unpack it when it died
                    files.remove(f"{target.parent}/{name}")
            with self._path(user, digest).open("rb") as file:
                unpack(file, target, abandoned)
        except FileNotFoundError as error:
            raise CannotUnpack(f"the archive {digest[:12]} is not there any more: {SEND_AGAIN}") from error
        except BrokenArchive as error:
            raise CannotUnpack(f"the archive {digest[:12]} cannot be unpacked: {error}") from error
        except OSError as error:
            raise CannotUnpack(f"cannot unpack the archive {digest[:12]}: {error.strerror or error}") from error

    async def _in_turn(self, user: str, work: Callable[[Callable[[], bool]], None]) -> None:
        turn = self._turns.setdefault(user, asyncio.Lock())
        async with turn:
            abandoned = threading.Event()
            done = asyncio.ensure_future(self._pool.run(work, abandoned.is_set))
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                abandoned.set()
                await asyncio.gather(done, return_exceptions=True)
                raise

    def _touch(self, path: Path) -> None:
        """On our own time line: a step of the wall clock makes nothing old."""
        now = self._clock.now()
        os.utime(path, (now, now))

    def _path(self, user: str, digest: str) -> Path:
        return self._root / user / f"{digest}{SUFFIX}"
