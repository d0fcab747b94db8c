"""The wait of an attempt at the mesh gate, in the agent: it is logged only if it is long or ends without all hosts."""

import asyncio
from collections.abc import Callable

from basilica import mesh
from basilica.rank.log import log

LONG_WAIT_S = 15.0  # shorter waits are not logged, since the log is the rank's


class Gate:
    """One wait, from construction until `close`. `on_passed` is called when the gate opens or its time is over."""

    def __init__(self, timeout: float, on_passed: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._reminder = loop.call_later(LONG_WAIT_S, log, "waiting until enough ranks are there and reach each other")
        self._task = asyncio.create_task(mesh.wait_saying(lambda _: None, timeout))
        self._task.add_done_callback(lambda _: on_passed())

    @property
    def passed(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        self._reminder.cancel()
        if self.passed:
            _log_outcome(asyncio.get_running_loop().time() - self._began)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _log_outcome(seconds: float) -> None:
    """Log how the wait ended, unless all went well and quickly."""
    match mesh.mesh_status():
        case "degraded":
            log("not all hosts reach each other: the rank starts all the same (basilica train why says which)")
        case "timeout":
            log(f"within {seconds:.0f} s nobody said that the hosts reach each other: the rank starts all the same")
        case "ready" if seconds >= LONG_WAIT_S:
            log(f"the rank starts after {seconds:.0f} s")
        case _:
            pass
