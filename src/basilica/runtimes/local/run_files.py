"""What is on disk of a run as a whole: its attempts, what its ranks returned, and removing it."""

import os
import shutil
from contextlib import suppress

from basilica.core.errors import DistributedError
from basilica.runtimes.local import supervisor
from basilica.runtimes.local.attempts import has_ended
from basilica.runtimes.local.layout import Key, Layout
from basilica.runtimes.local.records import Record, read_record

RESULT_BYTES_MAX = 8 << 20


def unended(layout: Layout) -> list[str]:
    """Runs with an attempt that has not ended, or of which that cannot be told."""
    return [instance for instance in layout.instances() if not all_ended(layout, instance)]


def all_ended(layout: Layout, instance: str) -> bool:
    """True if that is certain of every attempt of the run."""
    try:
        return all(has_ended(layout, key) for key in layout.keys(instance))
    except (OSError, ValueError):
        return False


def read_run(layout: Layout, instance: str) -> dict[Key, Record | None]:
    return {key: read_record(layout.record(key)) for key in layout.keys(instance)}


def read_results(layout: Layout, instance: str) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(layout.results(instance)):
            number, _, kind = name.partition(".")
            if kind == "json" and number.isascii() and number.isdigit():
                path = layout.results(instance) / name
                if path.stat().st_size > RESULT_BYTES_MAX:
                    raise DistributedError(f"the result of rank {number} is larger than {RESULT_BYTES_MAX} bytes")
                found[int(number)] = path.read_bytes()
    return dict(sorted(found.items()))


def remove_run(layout: Layout, instance: str) -> None:
    """As a whole, then piece by piece: a late supervisor must not find its directory without the note that stops it."""
    for record in read_run(layout, instance).values():
        for path in () if record is None else record.claim.cgroups:
            supervisor.remove_cgroup(path)
    layout.removing.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileNotFoundError):
        os.rename(layout.run(instance), layout.removing / instance)
        shutil.rmtree(layout.removing / instance)


def finish_removing(layout: Layout) -> None:
    """What an earlier server was about to remove when it died."""
    with suppress(FileNotFoundError):
        shutil.rmtree(layout.removing)
