"""The report files of ranks as their readers see them: one for each process, `reports/<rank>.<attempt>.<pid>`."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from basilica.core.reports import Report, Series, SeriesQuery
from basilica.machine import files as door
from basilica.machine.layout import Key, Layout
from basilica.reports.points import TIME_MAX, Point, parse, read_points
from basilica.reports.series import Source, series_of
from basilica.reports.writer import FILE_BYTES_MAX, FILES_MAX

HEAD_BYTES = 512
TAIL_BYTES = (4 << 10, 128 << 10)  # most last lines are short
READ_BYTES_MAX = 2 * FILE_BYTES_MAX  # any program may have written it
WORKERS_MAX = 1 << 20

_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class ReportFile:
    """The file of one process of one attempt."""

    key: Key
    pid: int
    path: str

    @property
    def stacks(self) -> str:
        """The file that the process writes its stacks to on a signal; there only if it handles the signal."""
        return f"{self.path}.stack"


@dataclass(frozen=True, slots=True)
class LastReport:
    """The last report of a process. `start` is when the process started, as the kernel counts.

    `began` is the monotonic time of its first report, and `first_step` the first step that the file has.
    """

    start: int
    worker: int
    last: Point
    began: float = 0.0
    first_step: int | None = None


def report_file(layout: Layout, key: Key, pid: int) -> ReportFile:
    return ReportFile(key, pid, f"{layout.report(key)}.{pid}")


def report_files(layout: Layout, instance: str) -> list[ReportFile]:
    """Return the files of all processes that have reported."""
    try:
        names = door.names(str(layout.reports(instance)), keep=lambda name: _NAME.fullmatch(name) is not None)
    except OSError:  # no directory yet, or the rank put another file in its place
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    files = [report_file(layout, Key(instance, int(m[1]), int(m[2])), int(m[3])) for m in found]
    if len(files) <= FILES_MAX:
        return files
    count = Counter(file.key for file in files)
    return [file for file in files if count[file.key] <= 2 * FILES_MAX]  # our writer keeps fewer


def read_last(file: ReportFile) -> LastReport | None:
    """Return the newest report; None if none can be read. The process may be writing the file meanwhile."""
    for tail in TAIL_BYTES:
        try:
            with door.opened(file.path) as fd:
                head = door.read_at(fd, 0, HEAD_BYTES)
                size = os.fstat(fd).st_size
                data = door.read_at(fd, max(0, size - tail), tail)
        except OSError:
            return None
        for line in reversed(data.split(b"\n")):
            point = parse(line) if line else None
            if point is not None:
                about = _about(head)
                return LastReport(about.start, about.worker, point, about.began, _first_step(head))
    return None


class _About(NamedTuple):
    start: int = 0
    worker: int = 0
    began: float = 0.0


def _about(head: bytes) -> _About:
    """Parse the first line of a report file."""
    try:
        about = json.loads(head.partition(b"\n")[0])
        start, worker, began = int(about["start"] or 0), int(about["worker"]), float(about.get("mono", 0.0))
        return _About(start, worker if 0 <= worker < WORKERS_MAX else 0, began if 0 <= began < TIME_MAX else 0.0)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return _About()


def _first_step(head: bytes) -> int | None:
    """Return the step of the first point that has one, among those in the beginning of a report file."""
    whole = head.split(b"\n")[1:-1]  # the last one may be cut off
    points = (parse(line) for line in whole)
    return next((point.step for point in points if point is not None and point.step is not None), None)


def read_reports(layout: Layout, instance: str) -> dict[int, Report]:
    """Return the last report of each rank, with the last value of each number that any of its processes reported.

    Of a number that several processes report, the lowest worker's is shown: usually only that one reports.
    """
    found: dict[int, list[tuple[int, LastReport]]] = {}
    for file in report_files(layout, instance):
        last = read_last(file)
        if last is not None:
            found.setdefault(file.key.rank, []).append((file.key.attempt, last))
    return {rank: _report(reports) for rank, reports in sorted(found.items())}


def _report(found: Iterable[tuple[int, LastReport]]) -> Report:
    ordered = [
        report.last for _, report in sorted(found, key=lambda entry: (entry[0], -entry[1].worker, entry[1].last.at))
    ]
    values: dict[str, float] = {}
    step = usual = None
    for point in ordered:
        values |= point.last
        if point.step is not None:
            step = point.step
        if point.usual is not None:
            usual = point.usual
    at = max(round(point.at, 3) for point in ordered)
    return Report(at=at, step=step, step_seconds=usual, values=dict(sorted(values.items())))


def read_series(layout: Layout, instance: str, query: SeriesQuery) -> list[Series]:
    """Return the series by rank, worker and name, over all attempts."""
    files = report_files(layout, instance)
    wanted = [file for file in files if query.ranks is None or file.key.rank in query.ranks]
    return series_of(map(read_points_of, wanted), query)


def read_points_of(file: ReportFile) -> tuple[Source, list[Point]]:
    """Return all points of a process; none if its file cannot be read."""
    try:
        with door.opened(file.path) as fd:
            head, *lines = door.read_at(fd, 0, READ_BYTES_MAX).split(b"\n")
    except OSError:
        return (file.key.rank, 0), []
    points = list(read_points(lines))
    if points and not points[-1].values:  # a point that is still being gathered: its last values represent it
        newest = points[-1]
        points[-1] = newest._replace(values={name: (v, v, v, 1) for name, v in newest.last.items()})
    return (file.key.rank, _about(head).worker), points
