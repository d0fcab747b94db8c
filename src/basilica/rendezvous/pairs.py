"""The mirror of the hosts' reachability reports (see `basilica.rank.reachability`) in the run's rendezvous."""

import json
from collections.abc import Callable, Mapping

from basilica.core.mesh import Pair, failing_pairs
from basilica.rendezvous.mirror import KeysMirror
from basilica.rendezvous.names import PAIRS


class PairReports:
    """The reports of one run. `changed` is called after each new one."""

    def __init__(self, endpoint: str, changed: Callable[[], None]) -> None:
        self._mirror = KeysMirror(endpoint, PAIRS, self._apply)
        self._changed = changed
        self._reports: dict[str, Mapping[str, str]] = {}
        self._failing: dict[tuple[str, ...], tuple[Pair, ...]] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._mirror.run()

    def failing(self, hosts: tuple[str, ...]) -> tuple[Pair, ...]:
        if hosts not in self._failing:
            self._failing = {hosts: failing_pairs(hosts, self._reports)}
        return self._failing[hosts]

    def _apply(self, key: str | None) -> None:
        values = self._mirror.values
        if key not in values:  # all of them, or one is gone
            self._reports.clear()
        for name in values if key not in values else (key,):
            report = parse_report(values[name])
            if report is not None:
                self._reports[name.removeprefix(f"{PAIRS}/")] = report
        self._failing.clear()
        self._changed()


def parse_report(value: str) -> Mapping[str, str] | None:
    try:
        report = json.loads(value)
    except ValueError:
        return None
    whole = isinstance(report, dict) and all(isinstance(problem, str) for problem in report.values())
    return report if whole else None
