"""What the hosts of a run tell of each other (see `basilica.reach`), followed in the run's rendezvous."""

import asyncio
import json
from collections.abc import Callable, Mapping

from basilica.core.mesh import Pair, failing_pairs
from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.exchange import NoAnswer

REPORTS = "/basilica/pairs"
AGAIN_AFTER_S = 1.0


class PairReports:
    """The reports of one run. `changed` is called after each that is new."""

    def __init__(self, endpoint: str, changed: Callable[[], None]) -> None:
        self._endpoint, self._changed = endpoint, changed
        self._reports: dict[str, Mapping[str, str]] = {}
        self._failing: dict[tuple[str, ...], tuple[Pair, ...]] = {}

    def failing(self, hosts: tuple[str, ...]) -> tuple[Pair, ...]:
        if hosts not in self._failing:
            self._failing = {hosts: failing_pairs(hosts, self._reports)}
        return self._failing[hosts]

    async def run(self) -> None:
        """Follow until cancelled; a rendezvous that is away is asked again."""
        keys = KeysClient(self._endpoint)
        try:
            while True:
                try:
                    await self._follow(keys)
                except NoAnswer:
                    await asyncio.sleep(AGAIN_AFTER_S)
        finally:
            await keys.close()

    async def _follow(self, keys: KeysClient) -> None:
        found = await keys.get(REPORTS, recursive=True)
        self._reports.clear()
        self._take_in(found)
        index = found.index
        while True:
            event = await keys.wait(REPORTS, index + 1, recursive=True)
            index = event.node.get("modifiedIndex", 0)
            if not event.ok or not isinstance(index, int):
                return  # the history does not go back so far: read it all again
            self._take_in(event)

    def _take_in(self, answer: Answer) -> None:
        for key, value in answer.leaves().items():
            report = parse_report(value)
            if report is not None:
                self._reports[key.removeprefix(f"{REPORTS}/")] = report
        self._failing.clear()
        self._changed()


def parse_report(value: str) -> Mapping[str, str] | None:
    try:
        report = json.loads(value)
    except ValueError:
        return None
    whole = isinstance(report, dict) and all(isinstance(problem, str) for problem in report.values())
    return report if whole else None
