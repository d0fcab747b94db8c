"""Archives of directories that users sent: stored unchanged, checked before they are trusted, unpacked once per run.

A hostile archive can take minutes to check or unpack. So threads of their own do it, one archive per user at a time,
and stop early when the caller is cancelled.
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
    """The run's directory cannot be unpacked; the text has the reason and the remedy."""


class Archives:
    """Stores archives as `<root>/<user>/<sha256>.tar.gz`; the file's time is that of its last request."""

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
        """Return the files last requested before then, including those of unfinished uploads."""
        found = []
        for path in self._root.glob("*/*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    found.append(path)
        return found

    def forget(self, in_use: Collection[tuple[str, str]], before: float) -> list[str]:
        """Remove old unused archives. Their age is read again: a new run may have just requested one."""
        forgotten = []
        for path in self.old(before):
            digest = path.name.removesuffix(SUFFIX)
            if (path.parent.name, digest) not in in_use:
                path.unlink(missing_ok=True)
                forgotten.append(digest)
        return forgotten

    async def unpack(self, user: str, digest: str, target: Path) -> None:
        """Make the directory, whole or not at all, unless it exists. `CannotUnpack` if that is impossible.

        A cancelled caller waits until the thread has stopped, so that no write comes later.
        """
        await self._in_turn(user, lambda abandoned: self._unpack(user, digest, target, abandoned))

    def _unpack(self, user: str, digest: str, target: Path, abandoned: Callable[[], bool]) -> None:
        if files.kind(str(target)) is not None:
            return  # kept as the last attempt left it
        try:
            for name in files.names(str(target.parent)):
                if name.startswith(f"{target.name}-"):  # the draft of an earlier server that died
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
        """Set the file's time by the steady clock: a step of the wall clock makes no archive old."""
        now = self._clock.now()
        os.utime(path, (now, now))

    def _path(self, user: str, digest: str) -> Path:
        return self._root / user / f"{digest}{SUFFIX}"
