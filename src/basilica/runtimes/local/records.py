"""The record of an attempt, which outlives everybody: who runs it, since when, and how it ended.

Lines of JSON, each appended by one write. The first is there from the moment the file has its name, so to make the
file is to claim the attempt. All fit into the file's first block: a full disk cannot keep the last from being written.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from basilica.machine import files
from basilica.machine.files import UnusableFile
from basilica.runtimes.local import supervisor

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
    """All that is known of one attempt."""

    claim: Claim
    running: Running | None = None
    exit: Exit | None = None


# A power cut may leave the file without its lines: somebody had it, on another boot.
NOBODY = Claim(pid=0, start=0, boot="", claimed_at=0.0)


def read_record(path: str) -> Record | None:
    """What is known of the attempt, None if nobody has it. `ValueError`: another version of basilica wrote it.

    `UnusableFile`: something else is in its place.
    """
    try:
        return parse_record(files.read(path, RECORD_BYTES_MAX))
    except FileNotFoundError:
        return None


def parse_record(data: bytes) -> Record:
    """A line that a power cut left without its end does not count."""
    claim = NOBODY
    running: Running | None = None
    exit: Exit | None = None
    for text in data.split(b"\n")[:-1]:
        line = json.loads(text)
        if line.pop("format", None) != supervisor.FORMAT:
            raise ValueError("a record of another version of basilica")
        match line.pop("what"):
            case "claim":
                claim = Claim(**{**line, "gpus": tuple(line["gpus"]), "cgroups": tuple(line["cgroups"])})
            case "running":
                running = Running(**line)
            case "exit" if exit is None:  # the first word stands
                exit = Exit(**line)
    return Record(claim=claim, running=running, exit=exit)


def append_exit(path: str, exit: Exit, record: Record | None = None) -> None:
    """Write down how the attempt ended. If something else is in the place of the record, `record` is written anew."""
    try:
        with files.opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            supervisor.append(fd, "exit", _fields(exit))
    except (FileNotFoundError, UnusableFile):
        if record is None:
            raise
        files.write(path, _text_of(replace(record, exit=exit)))


def _text_of(record: Record) -> bytes:
    parts = (("claim", record.claim), ("running", record.running), ("exit", record.exit))
    return b"".join(supervisor.record_line(what, _fields(part)) for what, part in parts if part is not None)


def bury(path: str, exit: Exit) -> bool:
    """Claim an attempt for nobody, ended already. False if somebody has it."""
    files.make_directory(os.path.dirname(path))
    tombstone = Claim(pid=0, start=0, boot="", claimed_at=exit.finished_at, tombstone=True)
    fd = supervisor.create_record(path, [("claim", _fields(tombstone)), ("exit", _fields(exit))])
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
