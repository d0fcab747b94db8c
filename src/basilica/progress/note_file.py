"""The note file of a process: what it contains, and how it is encoded and parsed. Pure.

A **note file** has two slots of 4096 bytes, written in turn. A slot is one line:

    <CRC-32 of the rest, 8 hex digits> <number of the write> <JSON document>, padded with spaces, ended by a newline

A process that is killed in the middle of a write spoils one slot; the other one has the write before. The newest whole
slot counts. The document is

    {"pid": 71, "start": 9123, "worker": 0, "mono": …, "at": …, "restoring": … | null,
     "restored": [step | null, tier, seconds, begin, end] | null, "blocked": seconds, "snapshots": 12,
     "every": 5 | null, "saved": {"memory": [step, size, time]}, "refused": [[number, text]]}

with monotonic times. `mono` is the time of the process's first note, `at` that of its last snapshot. A rank may have
made anything of its files: what the writer here cannot have written is None.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from basilica.reports.points import STEP_MAX, TIME_MAX

SLOT_BYTES = 4096
NOTE_FILE_BYTES = 2 * SLOT_BYTES
NOTE_SUFFIX = ".progress"  # after the name of the process's report file

TIERS = ("memory", "peer", "disk", "bucket")
TIER_CHARS = 16
TIERS_MAX = 8
REFUSALS_KEPT = 8
REFUSAL_CHARS = 300
WORKERS_MAX = 1 << 20
SIZE_MAX = 1 << 60

_CHECK_BYTES = 9  # the checksum and a space
_FOREIGN = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class RestoreNote:
    """A restore that is over. `step` None: there was nothing to restore."""

    step: int | None
    tier: str
    seconds: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class SavedNote:
    """The newest snapshot of a process in one tier."""

    step: int
    size: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The notes of one process. `refused` has the latest refused copies, by running numbers from 1."""

    pid: int
    start: int
    worker: int
    mono: float
    at: float
    restoring: float | None = None
    restored: RestoreNote | None = None
    blocked: float = 0.0
    snapshots: int = 0
    every: int | None = None
    saved: Mapping[str, SavedNote]
    refused: tuple[tuple[int, str], ...] = ()


# ---- writing -------------------------------------------------------------------------------------------------------


def encode_slot(number: int, document: Mapping[str, Any]) -> bytes:
    """Return a slot. Texts of refusals are cut, and then left out, until the document fits."""
    for chars in (REFUSAL_CHARS, 80, 20, 0):
        refused = [[n, text[:chars]] for n, text in document["refused"]]
        fields = json.dumps({**document, "refused": refused}, ensure_ascii=False, separators=(",", ":"))
        rest = f"{number} {fields}".encode(errors="replace")
        if len(rest) < SLOT_BYTES - _CHECK_BYTES:
            break
    else:
        raise ValueError("a note is too long")
    rest = rest.ljust(SLOT_BYTES - _CHECK_BYTES - 1) + b"\n"
    return b"%08x " % zlib.crc32(rest) + rest


# ---- reading -------------------------------------------------------------------------------------------------------


def parse_notes(data: bytes) -> Note | None:
    """Parse a note file; None if neither slot is whole."""
    if len(data) > NOTE_FILE_BYTES:
        return None
    slots = (_slot(data[begin : begin + SLOT_BYTES]) for begin in (0, SLOT_BYTES))
    found = [slot for slot in slots if slot is not None]
    return max(found, key=lambda slot: slot[0])[1] if found else None


def _slot(data: bytes) -> tuple[int, Note] | None:
    if len(data) != SLOT_BYTES or not data.endswith(b"\n"):
        return None
    try:
        rest = data[_CHECK_BYTES:]
        if data[: _CHECK_BYTES - 1] != b"%08x" % zlib.crc32(rest):
            return None
        number, _, document = rest.partition(b" ")
        if not (number.isdigit() and len(number) < 20):
            return None
        return int(number), _note(json.loads(document))
    except _FOREIGN:
        return None


def _note(found: dict[str, Any]) -> Note:
    return Note(
        pid=_count(found["pid"]),
        start=_count(found["start"] or 0),
        worker=_count(found["worker"], WORKERS_MAX),
        mono=_time(found["mono"]),
        at=_time(found["at"]),
        restoring=None if found["restoring"] is None else _time(found["restoring"]),
        restored=None if found["restored"] is None else _restored(*found["restored"]),
        blocked=_time(found["blocked"]),
        snapshots=_count(found["snapshots"]),
        every=None if found["every"] is None else _count(found["every"]),
        saved=_saved(found["saved"]),
        refused=_refused(found["refused"]),
    )


def _restored(step: Any, tier: Any, seconds: Any, begin: Any, end: Any) -> RestoreNote:
    return RestoreNote(
        step=None if step is None else _step(step),
        tier=_tier(tier),
        seconds=_time(seconds),
        begin=_time(begin),
        end=_time(end),
    )


def _saved(found: Any) -> dict[str, SavedNote]:
    if type(found) is not dict or len(found) > TIERS_MAX:
        raise TypeError(type(found))
    return {
        _tier(tier): SavedNote(step=_step(step), size=_count(size, SIZE_MAX), at=_time(at))
        for tier, (step, size, at) in found.items()
    }


def _refused(found: Any) -> tuple[tuple[int, str], ...]:
    """Return the refusals in the order of their numbers, each number once."""
    if type(found) is not list or len(found) > REFUSALS_KEPT:
        raise TypeError(type(found))
    by_number = {_count(number): clean(text) for number, text in found}
    return tuple((number, by_number[number]) for number in sorted(by_number))


def clean(text: object) -> str:
    """Return one printable line of bounded length that can be stored: half a surrogate pair cannot."""
    if type(text) is not str:
        raise TypeError(type(text))
    line = text[:REFUSAL_CHARS].encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else " " for char in line)


def _tier(found: Any) -> str:
    if type(found) is not str or not 0 < len(found) <= TIER_CHARS or not found.isidentifier():
        raise ValueError(found)
    return found


def _count(found: Any, most: int = STEP_MAX) -> int:
    if type(found) is not int or not 0 <= found < most:
        raise ValueError(found)
    return found


def _step(found: Any) -> int:
    if type(found) is not int or not -STEP_MAX < found < STEP_MAX:
        raise ValueError(found)
    return found


def _time(found: Any) -> float:
    if type(found) not in (int, float) or not (math.isfinite(found) and 0 <= found < TIME_MAX):
        raise ValueError(found)
    return float(found)
