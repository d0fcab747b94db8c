"""Readers of a rank's log files: of their end, and from a cursor on. The supervisor frees their old parts.

A cursor is `attempt:offset` in bytes. Offsets never shift: a freed part is a hole at the beginning of the file. Each
read is bounded, however long lines and files are. A rank can put anything in the place of its log: reading that raises
`UnusableFile`, and readers are shown `placeholder` instead.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from basilica.core.errors import ValidationError
from basilica.machine import files
from basilica.machine.files import UnusableFile

LINE_MAX = 1 << 20
BATCH = 1 << 16
BLOCK = 1 << 16
LINES_ALL = 1 << 62
READ_BACK_MAX = 1 << 30  # a log is longer only if its program made it so
OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    attempt: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        attempt, _, offset = text.partition(":")
        if not (attempt.isascii() and attempt.isdigit() and offset.isascii() and offset.isdigit() and len(text) < 60):
            raise ValidationError("since", text, "not a cursor that this server gave out")
        return cls(int(attempt), min(int(offset), OFFSET_MAX))


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines, and the offset behind the last of them."""

    lines: tuple[str, ...]
    offset: int


def read_on(log: str, offset: int, *, ended: bool) -> Lines:
    """Return the next lines from `offset`, about `BATCH` bytes of them; none if no line is whole.

    The last line of an ended attempt is whole without a newline. A line longer than `LINE_MAX` comes in pieces.
    """
    with _opened(log) as fd:
        if fd is None:
            return Lines((), offset)
        size = os.fstat(fd).st_size
        if offset > size:  # the program truncated its own output
            offset = 0
        offset = _past_hole(fd, offset, size)
        data = os.pread(fd, BATCH, offset)
        while b"\n" not in data and offset + len(data) < size and len(data) < LINE_MAX:
            data += os.pread(fd, BATCH, offset + len(data))
        complete = ended and offset + len(data) >= size
        end = len(data) if complete else data.rfind(b"\n") + 1
        if not end and len(data) >= LINE_MAX:
            end = _cut(data, LINE_MAX)
    return Lines(_decoded(data[:end]), offset + end)


def read_tail(log: str, lines: int, *, ended: bool, at_most: int | None = None) -> Lines:
    """Return the last lines, read from the end backwards, so that a large file costs no more than a small one.

    `at_most` bounds the bytes that are read; of a longer line only the end is returned.
    """
    with _opened(log) as fd:
        if fd is None:
            return Lines((), 0)
        size = os.fstat(fd).st_size
        first = _past_hole(fd, 0, size)
        if at_most is not None:
            first = max(first, size - at_most)
        position, newlines = size, 0
        parts: list[bytes] = []
        # One newline more than lines are wanted: the line before them must be known to have ended.
        while position > first and newlines <= lines:
            step = min(BLOCK, position - first)
            position -= step
            parts.append(os.pread(fd, step, position))
            newlines += parts[-1].count(b"\n")
    data = b"".join(reversed(parts))
    if not ended:
        data = data[: data.rfind(b"\n") + 1]
    end = position + len(data)
    if newlines > lines:
        data = data[data.find(b"\n") + 1 :]
    return Lines(_decoded(data)[-lines:] if lines else (), end)


@dataclass(frozen=True, slots=True)
class Tail:
    """The offsets at which the last lines begin and end, and their number."""

    offset: int
    lines: int
    end: int = field(default=0, compare=False)


def find_tail(log: str, lines: int, *, ended: bool) -> Tail:
    """Return the place of the last lines, by the rules of `read_tail`; the lines are not kept in memory."""
    with _opened(log) as fd:
        if fd is None:
            return Tail(0, 0)
        size = os.fstat(fd).st_size
        first = max(_past_hole(fd, 0, size), size - READ_BACK_MAX)
        position, found = size, 0
        end = size if ended else None  # else behind the last newline, once it is found
        while position > first:
            step = min(BLOCK, position - first)
            position -= step
            block = os.pread(fd, step, position)
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                begin = position + at + 1
                end = begin if end is None else end
                if found == lines:
                    return Tail(end, 0, end)
                found += begin < end
                if found == lines:
                    return Tail(begin, found, end)
    end = first if end is None else end
    return Tail(first, found + (first < end), end) if lines else Tail(end, 0, end)


def placeholder(error: UnusableFile) -> str:
    """Return the line that is shown in place of unreadable output."""
    return f"<basilica: this output cannot be shown: {error}>"


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    try:
        with files.opened(path) as fd:
            yield fd
    except FileNotFoundError:
        yield None


def _past_hole(fd: int, offset: int, size: int) -> int:
    """Return the offset of the first whole line at or after `offset` that is still kept."""
    if offset >= size:
        return offset
    try:
        data = os.lseek(fd, offset, os.SEEK_DATA)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENXIO:
            return size
        return offset  # a file system without holes
    if data == offset:
        return offset
    position = data
    while position < size:
        block = os.pread(fd, BLOCK, position)
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        if not block or position - data > LINE_MAX:
            break
        position += len(block)
    return data


def _decoded(data: bytes) -> tuple[str, ...]:
    if not data:
        return ()
    raw = data.removesuffix(b"\n").split(b"\n")
    return tuple(piece.decode(errors="replace").removesuffix("\r") for line in raw for piece in _pieces(line))


def _pieces(line: bytes) -> Iterator[bytes]:
    while len(line) > LINE_MAX:
        cut = _cut(line, LINE_MAX)
        yield line[:cut]
        line = line[cut:]
    yield line


def _cut(data: bytes, limit: int) -> int:
    """Return the last offset up to `limit` at which a cut divides no character."""
    for cut in range(limit, limit - 4, -1):
        if cut >= len(data) or data[cut] & 0xC0 != 0x80:
            return cut
    return limit
