"""What tests took when they were last measured: `tests/slow.txt` has those that take long, with their seconds.

It decides what `make test-fast` leaves out and what `make test` starts with. A test that it does not name is fast.
`make test` measures every test, and `make durations` makes the file of that.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "slow.txt"
SLOW_SECONDS = 0.2  # what takes less fits into a minute, all together

_HEADER = "# Made by `make durations`: seconds with those of the set-up, and of several cases those of the longest.\n"


def test_of(nodeid: str) -> str:
    """A test without the case: one line stands for all of them."""
    return nodeid.partition("[")[0]


def read(file: Path = FILE) -> dict[str, float]:
    found = {}
    for line in file.read_text().splitlines():
        if line and not line.startswith("#"):
            seconds, _, test = line.partition(" ")
            found[test] = float(seconds)
    return found


def write(times: Iterable[tuple[str, float]], file: Path = FILE) -> None:
    found = sorted(times)
    file.write_text(_HEADER + "".join(f"{seconds:.2f} {test}\n" for test, seconds in found))


def longest_cases(times: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    most: dict[str, float] = {}
    for nodeid, seconds in times:
        test = test_of(nodeid)
        most[test] = max(seconds, most.get(test, 0.0))
    return ((test, seconds) for test, seconds in most.items() if seconds >= SLOW_SECONDS)


class Stopwatch:
    """Adds up what each test took, with its set-up and what it cleaned up."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write(self._seconds.items(), self._file)
