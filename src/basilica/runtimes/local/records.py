"""The record of an attempt, which outlives every process: its supervisor, its start and its end.

A record is lines of JSON, each appended by one write. The file gets its name with the first line in it, so creating the
file claims the attempt. All lines fit into the file's first block: a full disk cannot prevent the last from being
written.
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
    """The supervisor of this attempt. `tombstone`: there is none; the attempt ended before it started."""

    pid: int
    start: int
    boot: str
    claimed_at: float
    gpus: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    tombstone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The rank's own process, and the time at which it executed the user's program."""

    pid: int
    start: int
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of the attempt; most fields are those of `core.seen.Ended`."""

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
    """The parsed record of one attempt. `damage` names the part that could not be read."""

    claim: Claim
    running: Running | None = None
    exit: Exit | None = None
    damage: str = ""

    @property
    def claim_lost(self) -> bool:
        """True if damage hides the claim; a claim lost in a power cut is of another boot, and is no damage."""
        return bool(self.damage) and not self.claim.boot


Line = TypeVar("Line", Claim, Running, Exit)

# A power cut may leave the file without its lines: a supervisor of another boot had the attempt.
NOBODY = Claim(pid=0, start=0, boot="", claimed_at=0.0)


def read_record(path: str) -> Record | None:
    """Return the record, None if the attempt is unclaimed. A damaged line is named, and hides no other line.

    `UnusableFile`: something else is in the place of the record.
    """
    try:
        return parse_record(files.read(path, RECORD_BYTES_MAX))
    except FileNotFoundError:
        return None


def parse_record(data: bytes) -> Record:
    """Parse the record's lines; a last line that a power cut left without its end does not count."""
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
        case "exit" if record.exit is None:  # the first exit line counts
            return replace(record, exit=_checked(Exit(**line), finished_at=(int, float), reason=str))
    return record


def _checked(value: Line, **types: type | tuple[type, ...]) -> Line:
    """Return the value if the fields that others compute with have these types, else raise `ValueError`."""
    for name, kind in types.items():
        if not isinstance(getattr(value, name), kind):
            raise ValueError(name)
    return value


def append_exit(path: str, exit: Exit, record: Record | None = None) -> None:
    """Append the end of the attempt. If the record is gone or unusable, write `record` anew with the end."""
    try:
        with files.opened(path, os.O_RDWR | os.O_APPEND) as fd:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # an unterminated line would swallow this one
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
    """Record an unclaimed attempt as ended, so that it never starts. False if it is claimed."""
    files.make_directory(os.path.dirname(path))
    tombstone = Claim(pid=0, start=0, boot="", claimed_at=exit.finished_at, tombstone=True)
    fd = create_record(path, [("claim", _fields(tombstone)), ("exit", _fields(exit))])
    if fd is None:
        return False
    os.close(fd)
    return True


def write_stop(path: str, grace_seconds: float) -> None:
    """Write the stop file. A later request may shorten the grace, never lengthen it, even if the first is unread."""
    # There is no earlier request, a power cut left it empty, or another program wrote the file.
    with suppress(OSError, ValueError, TypeError, KeyError):
        grace_seconds = min(grace_seconds, float(json.loads(files.read(path, STOP_BYTES_MAX))["grace"]))
    files.make_directory(os.path.dirname(path))
    files.write(path, json.dumps({"grace": grace_seconds}).encode())


def _fields(record: Claim | Running | Exit) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
