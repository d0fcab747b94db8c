"""The relay of planned changes to a rank: from the key in the run's keyspace to the file that its program maps.

The key is watched only from the moment on at which somebody needs it: a process of the rank reads notices, or the run
asks for a signal. A second watch of each rank is cheaper than one watch of both keys, which would have to be that of
their common directory, and would bring every rank the reports of all others.

**Times.** The notice in the keyspace has moments of the controller's time line, the notice file one of this machine's
wall clock, and nothing says how far those two are apart. A notice whose number is new and that arrives by the watch was
published just now, so that the time it leaves is what counts, from now on. One that is found when the keyspace answers
anew may be old: then the two clocks are taken as equal, as far as that leaves no more time than the notice had when it
was published. A notice that is published again under its number keeps the difference that its first arrival showed.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

from basilica.core.notices import Notice
from basilica.core.seen import SeenAgent
from basilica.progress.notice_file import PublishedNotice, write_notice
from basilica.rank.key_watch import watch_key
from basilica.rank.log import log
from basilica.rendezvous.announcements import parse_notice
from basilica.rendezvous.names import NOTICE

SIGNALS = {"SIGUSR1": signal.SIGUSR1, "SIGUSR2": signal.SIGUSR2}


class NoticeRelay:
    """The notice file of one agent's ranks. `on_new` is called after a notice with a new number was written to it."""

    def __init__(self, endpoint: str, path: str, on_new: Callable[[], None]) -> None:
        self._endpoint, self._path, self._on_new = endpoint, path, on_new
        self._needed = asyncio.Event()
        self._number = 0  # of the notice that was published last
        self._ahead = 0.0  # seconds from the controller's time line to this wall clock
        self._write(None)

    def watch(self) -> None:
        """Begin to watch, unless that has begun."""
        self._needed.set()

    async def run(self) -> None:
        await self._needed.wait()
        await watch_key(self._endpoint, NOTICE, self._take)

    def _take(self, text: str, written_now: bool) -> None:
        notice = parse_notice(text)
        if notice is None:
            self._write(None)
            return
        is_new, now = notice.number != self._number, time.time()
        if is_new:
            self._number, self._ahead = notice.number, clock_difference(notice, now, written_now=written_now)
        self._write(notice)
        if is_new:
            self._on_new()

    def _write(self, notice: Notice | None) -> None:
        """Write the file. What the disk or the rank prevents is logged: the change happens all the same."""
        try:
            write_notice(self._path, None if notice is None else to_publish(notice, self._ahead))
        except (OSError, ValueError) as error:
            log(f"the rank is not told of a planned change: {error}")


def clock_difference(notice: Notice, now: float, *, written_now: bool) -> float:
    """Return the seconds to add to moments of the notice, for this machine's wall clock, which says `now`."""
    elapsed = now - max(notice.since, notice.proposed_at)
    return elapsed if written_now else min(0.0, elapsed)


def to_publish(notice: Notice, ahead: float) -> PublishedNotice:
    return PublishedNotice(
        number=notice.number,
        kind=notice.kind.value,
        until=max(0.0, notice.until + ahead),
        target=notice.target,
        step=notice.step,
        reason=notice.reason,
    )


def pids_to_signal(rank_pid: int, agent: SeenAgent | None) -> tuple[int, ...]:
    """Return the processes that are told of a notice by a signal: the program itself, else torchrun's workers.

    A torchrun agent would end by it; one that has no workers now starts them with the notice in place.
    """
    if agent is None:
        return (rank_pid,)
    own = (0, 1, os.getpid())  # a journal is the rank's own, and may name anything
    return tuple(pid for pid in agent.pids if pid not in own) if agent.executing_since is not None else ()
