"""The notice file and the answer line: what they contain, and how they are encoded and parsed. Pure.

A **notice file** has 4096 bytes: a counter, 8 bytes, little-endian, and a JSON document, padded with NULs. The counter
is that of a sequence lock: odd while the writer writes, even otherwise, greater after every write, and 0 as long as
nothing was published. The document is `null` or

    {"number": 3, "kind": "scale", "until": 1700000000.0, "target": 4, "step": 1200, "reason": "…"}

An **answer file** has 512 bytes, one line of JSON, padded with spaces and ended by a newline:

    {"pid": 71, "start": 9123, "worker": 0, "number": 3, "state": "seen", "step": 1187, "at": …, "mono": …}

Programs of users parse the first and the control plane parses the second, of which a rank may have made anything: what
the writer here cannot have written is None.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from basilica.reports.points import STEP_MAX, TIME_MAX

NOTICE_FILE_BYTES = 4096
COUNTER_BYTES = 8
REASON_LENGTH_MAX = 500
KIND_LENGTH_MAX = 32

ANSWER_BYTES = 512
ANSWER_SUFFIX = ".notice"  # after the name of the process's report file
WORKERS_MAX = 1 << 20

Kind = Literal["scale", "restart", "cancel", "deadline", "preemption", "drain"]
State = Literal["listening", "seen", "late", "given", "ready"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNotice:
    """An announced change. `number` counts the notices of a run from 1; `until` is in seconds since the epoch."""

    number: int
    kind: str
    """One of `Kind`; a rank passes on kinds that it does not know."""
    until: float
    target: int | None = None
    step: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLine:
    """The answer of one process: `number` is that of the last notice that it has read, 0 before the first."""

    pid: int
    start: int
    worker: int
    number: int
    state: State
    step: int | None
    at: float
    mono: float


# ---- the notice file -----------------------------------------------------------------------------------------------


def encode_notice(notice: PublishedNotice | None) -> bytes:
    """Return the bytes after the counter. A long reason is cut; what no rank accepts is a `ValueError`."""
    if notice is None:
        return b"null".ljust(NOTICE_FILE_BYTES - COUNTER_BYTES, b"\0")
    fields = asdict(notice) | {"reason": notice.reason[:REASON_LENGTH_MAX]}
    document = json.dumps(fields, ensure_ascii=False).encode(errors="replace")
    payload = document.ljust(NOTICE_FILE_BYTES - COUNTER_BYTES, b"\0")
    if len(payload) > NOTICE_FILE_BYTES - COUNTER_BYTES or parse_notice(payload) is None:
        raise ValueError(f"not a notice: {notice}")
    return payload


def parse_notice(payload: bytes) -> PublishedNotice | None:
    """Parse the bytes after the counter; None for `null` and for anything else that is no notice."""
    try:
        found: dict[str, Any] = json.loads(payload.rstrip(b"\0"))
        notice = PublishedNotice(
            number=found["number"],
            kind=found["kind"],
            until=float(found["until"]),
            target=found["target"],
            step=found["step"],
            reason=str(found["reason"])[:REASON_LENGTH_MAX],
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    sound = (
        _is_count(notice.number)
        and notice.number > 0
        and type(notice.kind) is str
        and 0 < len(notice.kind) <= KIND_LENGTH_MAX
        and _is_time(notice.until)
        and (notice.target is None or _is_count(notice.target))
        and (notice.step is None or _is_step(notice.step))
    )
    return notice if sound else None


def is_written(counter: bytes) -> bool:
    """Whether the counter is that of a finished write: during a write it is odd."""
    return counter[0] % 2 == 0


def next_counters(counter: bytes) -> tuple[bytes, bytes]:
    """Return the counters for the duration of the next write and after it. A write that was broken off is continued."""
    number = int.from_bytes(counter, "little")
    during = (number | 1) % 2 ** (8 * COUNTER_BYTES)
    after = (during + 1) % 2 ** (8 * COUNTER_BYTES) or 2
    return during.to_bytes(COUNTER_BYTES, "little"), after.to_bytes(COUNTER_BYTES, "little")


# ---- the answer line -----------------------------------------------------------------------------------------------


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Return the line of an answer, always of the same length: it is written in place."""
    return json.dumps(answer).encode().ljust(ANSWER_BYTES - 1) + b"\n"


def parse_answer(data: bytes) -> AnswerLine | None:
    """Parse the answer; None for anything that no process of ours wrote."""
    if len(data) != ANSWER_BYTES or not data.endswith(b"\n"):
        return None
    try:
        found: dict[str, Any] = json.loads(data)
        answer = AnswerLine(
            pid=found["pid"],
            start=found["start"] or 0,
            worker=found["worker"],
            number=found["number"],
            state=found["state"],
            step=found["step"],
            at=float(found["at"]),
            mono=float(found["mono"]),
        )
        sound = (
            all(_is_count(n) for n in (answer.pid, answer.start, answer.worker, answer.number))
            and answer.worker < WORKERS_MAX
            and answer.state in STATES
            and (answer.step is None or _is_step(answer.step))
            and _is_time(answer.at)
            and _is_time(answer.mono)
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return answer if sound else None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < STEP_MAX


def _is_step(value: object) -> bool:
    return type(value) is int and -STEP_MAX < value < STEP_MAX


def _is_time(value: float) -> bool:
    return math.isfinite(value) and 0 <= value < TIME_MAX
