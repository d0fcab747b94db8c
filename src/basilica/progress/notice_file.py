"""The writer of a notice file, for runtimes: `write_notice(path, notice)`.

There is one writer of a file at a time. It writes in place, under the counter, so that ranks which have mapped the file
see each notice as soon as it is published. The ranks can write to the file too: nothing that is read from it is
trusted, and whatever they make of it, the next write repairs.
"""

import os

from basilica.core.notices import Notice
from basilica.machine import files as door
from basilica.progress.formats import (
    COUNTER_BYTES,
    NOTICE_FILE_BYTES,
    PublishedNotice,
    encode_notice,
    is_written,
    next_counters,
)

__all__ = ["PublishedNotice", "make_notice_file", "published", "write_notice"]

FILE_MODE = 0o600  # a runtime whose ranks have another user lets it read the file


def published(notice: Notice, shift: float) -> PublishedNotice:
    """Return the notice as ranks read it; `shift`: the seconds from the controller's time line to the wall clock."""
    return PublishedNotice(
        number=notice.number,
        kind=notice.kind.value,
        until=notice.until + shift,
        target=notice.target,
        step=notice.step,
        reason=notice.reason,
    )


def make_notice_file(path: str) -> None:
    """Make the file before ranks start that read it. One that is there stays as it is: it may have a notice."""
    if not os.path.lexists(path):
        write_notice(path, None)


def write_notice(path: str, notice: PublishedNotice | None) -> None:
    """Publish the notice, or with None that there is none. The file is made if missing; to repeat a write does nothing.

    `path` is canonical, as `machine.files` requires. Raises `OSError` if the file cannot be written.
    """
    payload = encode_notice(notice)
    with door.in_place(path, FILE_MODE) as fd:
        found = door.read_at(fd, 0, NOTICE_FILE_BYTES)
        counter = found[:COUNTER_BYTES].ljust(COUNTER_BYTES, b"\0")
        if is_written(counter) and found[COUNTER_BYTES:] == payload:
            return
        if not found and notice is None:
            _write(fd, counter + payload, 0)
            return
        during, after = next_counters(counter)
        # Whole from the first write on: a rank maps the file, and reading a page that the disk lacks would end it.
        _write(fd, during + payload if len(found) < NOTICE_FILE_BYTES else during, 0)
        _write(fd, payload, COUNTER_BYTES)
        _write(fd, after, 0)


def _write(fd: int, data: bytes, offset: int) -> None:
    if os.pwrite(fd, data, offset) < len(data):
        raise OSError("no room on the disk")
