"""The files of a run as a whole: its attempts, the results of its ranks, and its removal."""

import os
from contextlib import suppress

from basilica.core.errors import BadResult
from basilica.machine import files
from basilica.machine.cgroup_files import remove_cgroup
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Key, Layout, number_of
from basilica.runtimes.local.attempts import OnDisk, has_ended, read_attempt
from basilica.runtimes.local.records import NOBODY, Record, read_record

RESULT_BYTES_MAX = 8 << 20
RESULTS_BYTES_MAX = 128 << 20  # of all ranks together: one answer carries them


def unended(layout: Layout) -> list[str]:
    """Return the runs with an attempt that has not ended, or whose end is unreadable."""
    return [instance for instance in layout.instances() if not all_ended(layout, instance)]


def all_ended(layout: Layout, instance: str) -> bool:
    """Return True if every attempt of the run has certainly ended."""
    try:
        return all(has_ended(layout, key) for key in layout.keys(instance))
    except (OSError, ValueError):
        return False


def read_run(layout: Layout, instance: str, boot: str, now: float) -> dict[Key, OnDisk]:
    return {key: read_attempt(layout, key, boot, now) for key in layout.keys(instance)}


def read_records(layout: Layout, instance: str) -> dict[Key, Record | None]:
    """Return the records of a run, unchanged; an unusable file counts as a damaged record."""
    return {key: _record_of(layout.record(key)) for key in layout.keys(instance)}


def _record_of(path: str) -> Record | None:
    try:
        return read_record(path)
    except UnusableFile as error:
        return Record(claim=NOBODY, damage=str(error))


def read_results(layout: Layout, instance: str) -> dict[int, bytes | BadResult]:
    """Return the result of each rank, or its fault, which hides no other rank's result."""
    with suppress(FileNotFoundError):
        found = files.names(str(layout.results(instance)), keep=lambda name: name.endswith(".json"))
        ranks = (number_of(name.removesuffix(".json")) for name in found)
        return _read_results(layout, instance, sorted({rank for rank in ranks if rank is not None}))
    return {}


def _read_results(layout: Layout, instance: str, ranks: list[int]) -> dict[int, bytes | BadResult]:
    found: dict[int, bytes | BadResult] = {}
    room = RESULTS_BYTES_MAX
    for rank in ranks:
        result = _read_result(layout.result(instance, rank), rank)
        if isinstance(result, bytes):
            room -= len(result)
        found[rank] = (
            result if room >= 0 else BadResult(rank, f"has no room among {RESULTS_BYTES_MAX} bytes of results")
        )
    return found


def _read_result(path: str, rank: int) -> bytes | BadResult:
    try:
        return files.read(path, RESULT_BYTES_MAX)
    except FileNotFoundError:
        return BadResult(rank, "was removed while it was read")
    except UnusableFile as error:
        return BadResult(rank, error.problem)


def remove_run(layout: Layout, instance: str) -> None:
    """Rename the run away, then remove its files: a late supervisor must not find it without the stop request."""
    with suppress(OSError):
        for key in layout.keys(instance):
            _remove_cgroups(layout, key)
    files.make_directory(str(layout.removing))
    with suppress(FileNotFoundError):
        os.rename(layout.run(instance), layout.removing / instance)
    files.remove(str(layout.removing / instance))


def _remove_cgroups(layout: Layout, key: Key) -> None:
    with suppress(OSError, ValueError):  # the record was replaced by something else
        record = read_record(layout.record(key))
        for path in () if record is None else record.claim.cgroups:
            remove_cgroup(path)


def finish_removing(layout: Layout) -> None:
    """Remove the runs that an earlier server was removing when it died."""
    files.remove(str(layout.removing))
