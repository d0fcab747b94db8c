"""The files of one attempt, as its supervisor creates and keeps them: its record and its log.

A rank can remove or replace them: neither hides the end of the attempt.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from contextlib import suppress

from basilica.machine.proc import SAFELY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

FORMAT = 1


def create_record(path: str, lines: list[tuple[str, dict[str, Any]]]) -> int | None:
    """Create the record of an attempt, whole and exclusively. Return it open for appending; None if it exists."""
    draft = f"{path}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(draft)
    fd = os.open(draft, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)
    try:
        for what, fields in lines:
            append(fd, what, fields)
        os.link(draft, path)
    except FileExistsError:
        os.close(fd)
        return None
    finally:
        os.unlink(draft)
    return fd


def in_place(record: int, directory: str, path: str) -> int:
    """Return the record, open and under its name, restored if a rank removed or replaced it: that hides no exit."""
    with suppress(OSError):
        if os.path.realpath(path) == path and os.path.samestat(os.lstat(path), os.fstat(record)):
            return record
    for place in (os.path.dirname(directory), directory):
        if not make_directory(place) and not stat.S_ISDIR(os.lstat(place).st_mode):
            put_aside(place)
            make_directory(place)
    with suppress(FileNotFoundError):
        put_aside(path)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)
    os.write(fd, os.pread(record, 1 << 16, 0))
    os.close(record)
    return fd


def put_aside(path: str) -> None:
    os.rename(path, f"{path}.{os.getpid()}.{time.time_ns()}")


def create_log(path: str) -> int:
    """Create the log as a new file; a file that an earlier attempt put in its place is set aside, not written to."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)
    except FileExistsError:
        put_aside(path)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)


def record_line(what: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, "what": what, **fields}).encode() + b"\n"


def append(record: int, what: str, fields: dict[str, Any]) -> None:
    line = record_line(what, fields)
    written = os.write(record, line)
    if written < len(line):
        os.ftruncate(record, os.fstat(record).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_directory(path: str) -> bool:
    """Make the directory; return False if it exists already."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def claimed_attempts(rank_directory: str) -> Iterator[int]:
    for name in os.listdir(rank_directory):
        number, _, kind = name.partition(".")
        if kind == "record" and len(number) < 10 and number.isascii() and number.isdigit():
            yield int(number)
