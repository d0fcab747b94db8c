"""The heartbeats of a rank's agent to the run's rendezvous, and the fence that closes when no answer comes back.

A closed fence (`core.fencing`) ends the rank: another may be about to take its place.
"""

import asyncio
import contextlib
import math

from basilica.core.ends import FENCED
from basilica.core.fencing import Fence
from basilica.machine.clocks import counted
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.retries import opened, tries


class Heartbeat:
    """The heartbeat of one agent. Without a fence, or with a rendezvous that takes no heartbeats, it is silent."""

    def __init__(self, endpoint: str, sender: str, rank: int, fence: Fence | None) -> None:
        self._endpoint, self._sender, self._rank, self._fence = endpoint, sender, rank, fence

    async def run(self) -> None:
        """Send heartbeats until the rendezvous turns out to take none."""
        while self._fence is not None:
            async with opened(self._endpoint) as keys:
                async for again in tries():
                    with contextlib.suppress(NoAnswer):
                        if not await self.send(keys):
                            return
                        await asyncio.sleep(self._fence.heartbeat)
                        again.at_once = True

    async def send(self, keys: KeysClient) -> bool:
        """Send one heartbeat. False if the rendezvous takes none: nobody counts on the fence, so it is dropped."""
        fence = self._fence
        if fence is None:
            return False
        sent = counted()
        if await keys.heartbeat(self._sender, fence.heartbeat, fence.silence(sent), within=fence.heartbeat):
            fence.answered(sent)
            return True
        self._fence = None
        return False

    @property
    def fenced(self) -> bool:
        """Whether the fence is closed now: the rank must end."""
        return self._fence is not None and self._fence.closed(counted())

    @property
    def grace(self) -> float:
        """Seconds that a fenced rank has to end; without a fence there is no limit."""
        return math.inf if self._fence is None else self._fence.grace

    def until_fenced(self) -> float | None:
        """Return the seconds until the fence closes, unless an answer comes before; None if it is open or closed."""
        end = None if self._fence is None else self._fence.ends_at()
        now = counted()
        return None if end is None or end <= now else end - now + 0.01

    def fenced_line(self) -> str:
        silence = (self._fence.silence(counted()) if self._fence is not None else None) or 0.0
        return (
            f"the run's rendezvous has not answered for {silence:.0f} s: this node may be cut off, and another rank in "
            f"the place of rank {self._rank}; it ends ({FENCED})"
        )
