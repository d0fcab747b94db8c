"""What is on disk of a run as a whole: its attempts, what its ranks returned, and removing it."""

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
RESULTS_BYTES_MAX = 128 << 20  # of all ranks together: they travel in one answer


def unended(layout: Layout) -> list[str]:
    """Runs with an attempt that has not ended, or of which that cannot be told."""
    return [instance for instance in layout.instances() if not all_ended(layout, instance)]


def all_ended(layout: Layout, instance: str) -> bool:
    """True if that is certain of every attempt of the run."""
    try:
        return all(has_ended(layout, key) for key in layout.keys(instance))
    except (OSError, ValueError):
        return False


def read_run(layout: Layout, instance: str, boot: str, now: float) -> dict[Key, OnDisk]:
    return {key: read_attempt(layout, key, boot, now) for key in layout.keys(instance)}


def read_records(layout: Layout, instance: str) -> dict[Key, Record | None]:
    """The records of a run alone, as they are; one that is no file is a damaged one."""
    return {key: _record_of(layout.record(key)) for key in layout.keys(instance)}


def _record_of(path: str) -> Record | None:
    try:
        return read_record(path)
    except UnusableFile as error:
        return Record(claim=NOBODY, damage=str(error))


def read_results(layout: Layout, instance: str) -> dict[int, bytes | BadResult]:
    """What each rank wrote, or what is wrong with it: that hides nobody else's."""
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
    """As a whole, then piece by piece: a late supervisor must not find its directory without the note that stops it."""
    with suppress(OSError):
        for key in layout.keys(instance):
            _remove_cgroups(layout, key)
    files.make_directory(str(layout.removing))
    with suppress(FileNotFoundError):
        os.rename(layout.run(instance), layout.removing / instance)
    files.remove(str(layout.removing / instance))


def _remove_cgroups(layout: Layout, key: Key) -> None:
    with suppress(OSError, ValueError):  # a record that somebody has put something else in the place of
        record = read_record(layout.record(key))
        for path in () if record is None else record.claim.cgroups:
            remove_cgroup(path)


def finish_removing(layout: Layout) -> None:
    """What an earlier server was about to remove when it died."""
    files.remove(str(layout.removing))
