"""Reports of ranks, relayed by their entrypoints through the keyspace of their run."""

import json
import time
from collections.abc import Iterator, Mapping

from basilica.core.reports import Report
from basilica.ports import Run
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import SERIES
from basilica.rendezvous.retries import opened
from basilica.reports.points import Point
from basilica.reports.relay import parse_published
from basilica.reports.series import Source, thinned

READ_AGAIN_AFTER_S = 1.0
POINTS_KEPT = 100_000  # of a run that is over: more would not fit into its Secret


def parse_report(text: str) -> Report | None:
    """Parse a report; None for text that is not one."""
    try:
        found = json.loads(text)
        step, usual = found.get("step"), found.get("step_seconds")
        return Report(
            at=float(found["at"]),
            step=None if step is None else int(step),
            step_seconds=None if usual is None else float(usual),
            values={str(name): float(value) for name, value in found["values"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def parse_reports(texts: Mapping[int, str] | Mapping[str, str]) -> dict[int, Report]:
    found = {int(rank): parse_report(text) for rank, text in texts.items()}
    return {rank: report for rank, report in found.items() if report is not None}


class SeriesReader:
    """Reads series from the keyspaces of runs, with a short cache: a page of several numbers asks for each, and one
    answer has them all.
    """

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, dict[int, str]]] = {}  # by instance: when it was read, and the texts

    async def recent(self, run: Run, endpoint: str) -> dict[int, str]:
        """Return the series as they were at most a second ago."""
        now = time.monotonic()
        self._read = {key: entry for key, entry in self._read.items() if now - entry[0] < READ_AGAIN_AFTER_S}
        if run.instance not in self._read:
            self._read[run.instance] = now, await self.read(run, endpoint)
        return self._read[run.instance][1]

    async def read(self, run: Run, endpoint: str) -> dict[int, str]:
        """Read the series of each rank from the keyspace. `NoAnswer` if it does not answer."""
        async with opened(endpoint) as keys:
            found = await keys.get(SERIES, recursive=True)
        if not found.ok and found.status != 404:
            raise NoAnswer(f"{found.status} {found.body}")
        texts = {key.removeprefix(f"{SERIES}/"): text for key, text in found.leaves().items()}
        mine = {int(rank): text for rank, text in texts.items() if rank.isdecimal()}
        return {rank: text for rank, text in mine.items() if rank < run.spec.world.max}


def parse_series(texts: Mapping[int, str]) -> Iterator[tuple[Source, list[Point]]]:
    """Yield the series that each rank published of itself, one rank at a time: all of them at once are many."""
    for rank, text in texts.items():
        for source, points in parse_published(text).items():
            if source[0] == rank:
                yield source, points


def series_to_keep(texts: Mapping[int, str]) -> dict[Source, list[Point]]:
    """Return the series, each thinned to what can be kept in the end."""
    found: dict[Source, list[Point]] = {}
    for rank, text in texts.items():
        mine = dict(parse_series({rank: text}))
        each = max(1, POINTS_KEPT // (len(texts) * max(1, len(mine))))
        found |= {source: thinned(points, each) for source, points in mine.items()}
    return found
