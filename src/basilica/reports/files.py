"""Reading what the processes of ranks reported: one file for each, `reports/<rank>.<attempt>.<pid>`."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from basilica.core.reports import Report, Series, SeriesQuery
from basilica.machine import files as door
from basilica.machine.layout import Key, Layout
from basilica.reports.points import Point, parse, read_points
from basilica.reports.series import Source, series_of
from basilica.reports.writer import FILE_BYTES_MAX, FILES_MAX

HEAD_BYTES = 512
TAIL_BYTES = (4 << 10, 128 << 10)  # most last lines are short
READ_BYTES_MAX = 2 * FILE_BYTES_MAX  # whoever wrote it
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
        """Where the process writes its stacks when it is asked to; only there if it can be asked."""
        return f"{self.path}.stack"


@dataclass(frozen=True, slots=True)
class Told:
    """What a process told of itself, and last of all. `start` is when it started, as the kernel counts."""

    start: int
    worker: int
    last: Point


def report_file(layout: Layout, key: Key, pid: int) -> ReportFile:
    return ReportFile(key, pid, f"{layout.report(key)}.{pid}")


def report_files(layout: Layout, instance: str) -> list[ReportFile]:
    """Of all processes that have reported."""
    try:
        names = door.names(str(layout.reports(instance)), keep=lambda name: _NAME.fullmatch(name) is not None)
    except OSError:  # none yet, or what the rank put in their place
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    files = [report_file(layout, Key(instance, int(m[1]), int(m[2])), int(m[3])) for m in found]
    if len(files) <= FILES_MAX:
        return files
    count = Counter(file.key for file in files)
    return [file for file in files if count[file.key] <= 2 * FILES_MAX]  # more are not of our making


def read_last(file: ReportFile) -> Told | None:
    """The newest report; None if there is none that can be read. A process may be writing the file meanwhile."""
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
                start, worker = _about(head)
                return Told(start, worker, point)
    return None


def _about(head: bytes) -> tuple[int, int]:
    try:
        about = json.loads(head.partition(b"\n")[0])
        start, worker = int(about["start"] or 0), int(about["worker"])
        return start, worker if 0 <= worker < WORKERS_MAX else 0
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0, 0


def read_reports(layout: Layout, instance: str) -> dict[int, Report]:
    """The last report of each rank, with the last of each number that any of its processes reported.

    Where several processes report the same, that of the lowest worker is shown: usually only that one reports.
    """
    found: dict[int, list[tuple[int, Told]]] = {}
    for file in report_files(layout, instance):
        told = read_last(file)
        if told is not None:
            found.setdefault(file.key.rank, []).append((file.key.attempt, told))
    return {rank: _report(told) for rank, told in sorted(found.items())}


def _report(found: Iterable[tuple[int, Told]]) -> Report:
    ordered = [t for _, t in sorted(found, key=lambda entry: (entry[0], -entry[1].worker, entry[1].last.at))]
    values: dict[str, float] = {}
    step = usual = None
    for told in ordered:
        values |= told.last.last
        if told.last.step is not None:
            step = told.last.step
        if told.last.usual is not None:
            usual = told.last.usual
    at = max(round(told.last.at, 3) for told in ordered)
    return Report(at=at, step=step, step_seconds=usual, values=dict(sorted(values.items())))


def read_series(layout: Layout, instance: str, query: SeriesQuery) -> list[Series]:
    """By rank, worker and name, over all attempts."""
    files = report_files(layout, instance)
    wanted = [file for file in files if query.ranks is None or file.key.rank in query.ranks]
    return series_of(map(read_points_of, wanted), query)


def read_points_of(file: ReportFile) -> tuple[Source, list[Point]]:
    """All that a process reported; nothing if its file cannot be read."""
    try:
        with door.opened(file.path) as fd:
            head, *lines = door.read_at(fd, 0, READ_BYTES_MAX).split(b"\n")
    except OSError:
        return (file.key.rank, 0), []
    points = list(read_points(lines))
    if points and not points[-1].values:  # what is still being gathered into a point: its last values stand for it
        newest = points[-1]
        points[-1] = newest._replace(values={name: (v, v, v, 1) for name, v in newest.last.items()})
    return (file.key.rank, _about(head)[1]), points
