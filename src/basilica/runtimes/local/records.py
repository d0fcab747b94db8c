"""The record of an attempt, which outlives everybody: who runs it, since when, and how it ended.

Lines of JSON, each appended by one write. The first is there from the moment the file has its name, so to make the
file is to claim the attempt. All fit into the file's first block: a full disk cannot keep the last from being written.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from basilica.machine import files
from basilica.machine.files import UnusableFile
from basilica.runtimes.local.record_files import FORMAT, append, create_record, record_line

RECORD_BYTES_MAX = 1 << 16
STOP_BYTES_MAX = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who has this attempt. `tombstone`: nobody; it was stopped before it started and never will."""

    pid: int
    start: int
    boot: str
    claimed_at: float
    gpus: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    tombstone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The rank's own process, and when it executed the user's program."""

    pid: int
    start: int
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the attempt ended; most fields are those of `core.seen.Ended`."""

    exit_code: int | None
    reason: str
    finished_at: float
    signal: str | None = None
    stopped: bool = False
    by_platform: bool = False
    start_error: str | None = None
    oom_kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that is known of one attempt. `damage` names what of it could not be read."""

    claim: Claim
    running: Running | None = None
    exit: Exit | None = None
    damage: str = ""

    @property
    def claim_lost(self) -> bool:
        """Who has the attempt cannot be read; a claim that a power cut took is of another boot, and damages nothing."""
        return bool(self.damage) and not self.claim.boot


Line = TypeVar("Line", Claim, Running, Exit)

# A power cut may leave the file without its lines: somebody had it, on another boot.
NOBODY = Claim(pid=0, start=0, boot="", claimed_at=0.0)


def read_record(path: str) -> Record | None:
    """What is known of the attempt, None if nobody has it. What is damaged of it is named, and hides nothing else.

    `UnusableFile`: something else is in its place.
    """
    try:
        return parse_record(files.read(path, RECORD_BYTES_MAX))
    except FileNotFoundError:
        return None


def parse_record(data: bytes) -> Record:
    """A line that a power cut left without its end does not count."""
    record = Record(claim=NOBODY)
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = _with_line(record, json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            record = replace(record, damage=record.damage or f"its line {number} cannot be read")
    return record


def _with_line(record: Record, line: dict[str, Any]) -> Record:
    if line.pop("format", None) != FORMAT:
        return replace(record, damage=record.damage or "another version of basilica wrote it")
    match line.pop("what"):
        case "claim":
            claim = Claim(**{**line, "gpus": tuple(line["gpus"]), "cgroups": tuple(line["cgroups"])})
            return replace(record, claim=_checked(claim, pid=int, start=int, boot=str))
        case "running":
            return replace(record, running=_checked(Running(**line), pid=int, start=int, started_at=(int, float)))
        case "exit" if record.exit is None:  # the first word stands
            return replace(record, exit=_checked(Exit(**line), finished_at=(int, float), reason=str))
    return record


def _checked(value: Line, **types: type | tuple[type, ...]) -> Line:
    """Only what others compute with is looked at: `ValueError` if it is nothing to compute with."""
    for name, kind in types.items():
        if not isinstance(getattr(value, name), kind):
            raise ValueError(name)
    return value


def append_exit(path: str, exit: Exit, record: Record | None = None) -> None:
    """Write down how the attempt ended. If something else is in the place of the record, `record` is written anew."""
    try:
        with files.opened(path, os.O_RDWR | os.O_APPEND) as fd:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a line without its end would take this one with it
                os.write(fd, b"\n")
            append(fd, "exit", _fields(exit))
    except (FileNotFoundError, UnusableFile):
        if record is None:
            raise
        files.write(path, _text_of(replace(record, exit=exit)))


def _text_of(record: Record) -> bytes:
    parts = (("claim", record.claim), ("running", record.running), ("exit", record.exit))
    return b"".join(record_line(what, _fields(part)) for what, part in parts if part is not None)


def bury(path: str, exit: Exit) -> bool:
    """Claim an attempt for nobody, ended already. False if somebody has it."""
    files.make_directory(os.path.dirname(path))
    tombstone = Claim(pid=0, start=0, boot="", claimed_at=exit.finished_at, tombstone=True)
    fd = create_record(path, [("claim", _fields(tombstone)), ("exit", _fields(exit))])
    if fd is None:
        return False
    os.close(fd)
    return True


def write_stop(path: str, grace_seconds: float) -> None:
    """Ask for the end. A later wish may shorten the grace, never lengthen it, even if nobody has read the first yet."""
    # The first wish, or one that a power cut left empty, or that somebody else put there.
    with suppress(OSError, ValueError, TypeError, KeyError):
        grace_seconds = min(grace_seconds, float(json.loads(files.read(path, STOP_BYTES_MAX))["grace"]))
    files.make_directory(os.path.dirname(path))
    files.write(path, json.dumps({"grace": grace_seconds}).encode())


def _fields(record: Claim | Running | Exit) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
