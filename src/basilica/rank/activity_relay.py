"""The relay of a rank's activity to the run's keyspace: its torchrun agent, its steps and its answers to notices.

The processes of the rank write files and ring a bell, a FIFO; `progress.activity` distils the files. The result is
published when it has changed: at once after the bell, and otherwise every second, which is how steps are followed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from basilica.core.seen import Leaving, SeenAgent
from basilica.machine.clocks import steady_now
from basilica.machine.layout import Key, Layout
from basilica.progress.activity import NOTHING, Activity, read_activities
from basilica.progress.published import PublishedActivity, activity_key, encode
from basilica.rank.log import log
from basilica.reports.wakeups import Wakeup, Wakeups

POLL_EVERY_S = 1.0
READ_AGAIN_FIRST_S, READ_AGAIN_MAX_S = 0.002, 0.05  # the pause grows for a rank that rings without end
NEWS = ("agent", "answer", "progress", "reporting")

Publish = Callable[[str, str], None]
Tail = Callable[[], tuple[str, ...]]


class ActivityRelay:
    """The relay of one rank's attempts, one after the other.

    `publish` writes to the keyspace, sooner or later; `on_change` is called after each change of `activity`.
    """

    def __init__(
        self, rank: int, instance: str, layout: Layout, publish: Publish, on_change: Callable[[], None]
    ) -> None:
        self._rank, self._instance, self._layout = rank, instance, layout
        self._publish, self._on_change = publish, on_change
        self._bell: Wakeups | None = None
        self._rung = asyncio.Event()
        self._zero = steady_now() - time.monotonic()
        self._tail: Tail = tuple
        self._tails: dict[tuple[int, int], tuple[str, ...]] = {}  # of failed workers, by agent and number of the exit
        self._now = PublishedActivity(attempt=0)
        self._published: PublishedActivity | None = None

    @property
    def activity(self) -> Activity:
        """The activity of the present attempt, as it was last read."""
        return self._now.activity

    @property
    def bell(self) -> str:
        """The path of the FIFO."""
        return str(self._layout.wake)

    def begin(self, attempt: int, tail: Tail) -> None:
        """Begin with an attempt that is about to start; `tail` returns the last lines of its output."""
        self._tail, self._tails = tail, {}
        self._now = PublishedActivity(attempt=attempt)
        try:
            if self._bell is None:
                self._bell = Wakeups(self._layout.wake, self._heed, self._rung.set)
            else:
                self._bell.renew()
        except OSError as error:  # then the files are read every second
            log(f"the rank cannot ring: {error}")

    async def run(self) -> None:
        """Follow the attempt until cancelled."""
        pause = READ_AGAIN_FIRST_S
        while True:
            try:
                async with asyncio.timeout(POLL_EVERY_S):
                    await self._rung.wait()
            except TimeoutError:
                pass
            self._rung.clear()
            self._take(await asyncio.to_thread(self._read))
            await asyncio.sleep(pause)
            pause = min(2 * pause, READ_AGAIN_MAX_S) if self._rung.is_set() else READ_AGAIN_FIRST_S

    async def finish(self) -> None:
        """Read and publish the last of an attempt that has ended."""
        self._take(await asyncio.to_thread(self._read))

    def leave(self, leaving: Leaving) -> None:
        """Publish that the platform takes the rank's place away."""
        self._now = replace(self._now, leaving=leaving)
        self._publish_change()

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()

    def _heed(self, wakeup: Wakeup) -> None:
        if wakeup.what in NEWS:
            self._rung.set()

    def _read(self) -> Activity:
        key = Key(self._instance, self._rank, self._now.attempt)
        try:
            return read_activities(self._layout, self._instance, [key], self._moment).get(key, NOTHING)
        except (OSError, ValueError):  # the files are the rank's own; an attempt does not end by them
            return self._now.activity

    def _moment(self, mono: float) -> float:
        """Convert a monotonic time to this process's time line, always to the same moment: else all would change."""
        return round(self._zero + mono, 3)

    def _take(self, found: Activity) -> None:
        if found.agent is not None:
            found = replace(found, agent=self._with_output(found.agent))
        self._now = replace(self._now, activity=found)
        self._publish_change()

    def _with_output(self, agent: SeenAgent) -> SeenAgent:
        """Add the output that the rank had written when each failure of a worker was first seen."""
        own = [exit for exit in agent.exits if exit.exit_code != 0 and not exit.echo]
        fresh = [exit for exit in own if (agent.pid, exit.number) not in self._tails]
        if fresh:
            tail = self._tail()
            self._tails |= {(agent.pid, exit.number): tail for exit in fresh}
        shown = {(agent.pid, exit.number) for exit in own}
        self._tails = {key: tail for key, tail in self._tails.items() if key in shown}
        exits = (replace(exit, log_tail=self._tails.get((agent.pid, exit.number), ())) for exit in agent.exits)
        return replace(agent, exits=tuple(exits))

    def _publish_change(self) -> None:
        is_empty = self._now == PublishedActivity(attempt=self._now.attempt)
        if self._now == self._published or (self._published is None and is_empty):
            return
        self._published = self._now
        self._publish(activity_key(self._rank), encode(self._now))
        self._on_change()
