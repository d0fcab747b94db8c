"""The relay of ranks' reports to readers: last values with every answer about a run, fresh ones for watchers.

Reports are not stored: a status row is not written at every step. A watcher gets fresh values about once a second while
ranks report, and costs nothing while they do not.
"""

import asyncio
from collections.abc import Mapping

from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.errors import RuntimeUnavailable
from basilica.core.reports import Report
from basilica.ports import Runtime

PACE_SECONDS = 1.0
TRY_AGAIN_SECONDS = 15.0


async def last_reports(runtime: Runtime, deployment: Deployment) -> Mapping[int, Report]:
    """Return the last reports by rank; none if the runtime is unavailable: the rest of the answer is still of use."""
    try:
        return await runtime.reports(run_of(deployment))
    except RuntimeUnavailable:
        return {}


def newest(reports: Mapping[int, Report]) -> float:
    return max((report.at for report in reports.values()), default=0.0)


class Fresh:
    """The wait of a run's watcher for fresh values. `seen`: the time of the newest value that the watcher has."""

    def __init__(self, runtime: Runtime, seen: float) -> None:
        self._runtime = runtime
        self.shown(seen)

    def shown(self, seen: float) -> None:
        self.seen = round(seen, 3)
        self._not_before = asyncio.get_running_loop().time() + PACE_SECONDS

    async def wait(self, deployment: Deployment) -> None:
        try:
            await self._runtime.next_report(run_of(deployment), self.seen)
        except RuntimeUnavailable:
            await asyncio.sleep(TRY_AGAIN_SECONDS)
        await asyncio.sleep(self._not_before - asyncio.get_running_loop().time())
