"""Reading the log files of a rank: the end of them, and on from a place. The supervisor frees their old parts.

A place is `attempt:offset` in bytes. Offsets never shift: what was freed is a hole at the beginning of the file.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from basilica.core.errors import ValidationError

LINE_MAX = 1 << 20
BATCH = 1 << 16
BLOCK = 1 << 16
LINES_ALL = 1 << 62


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
        return cls(int(attempt), min(int(offset), (1 << 63) - 1))


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines, and the offset behind the last of them."""

    lines: tuple[str, ...]
    offset: int


def read_on(log: str, offset: int, *, ended: bool) -> Lines:
    """The next lines from `offset`, about `BATCH` bytes of them; none if there is no whole one.

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
    """The last lines, read from the end backwards, so that a large file costs no more than a small one.

    `at_most` bounds the bytes that are looked at; of a longer line only the end is given.
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
    """Where the last lines begin, and how many they are."""

    offset: int
    lines: int


def find_tail(log: str, lines: int, *, ended: bool) -> Tail:
    """Find the last lines from the end backwards, a block at a time: what they are is not kept."""
    with _opened(log) as fd:
        if fd is None:
            return Tail(0, 0)
        size = os.fstat(fd).st_size
        first = _past_hole(fd, 0, size)
        # The line before them must have ended: they begin after one newline more than they are.
        newlines = 1 if ended and size > first and os.pread(fd, 1, size - 1) != b"\n" else 0
        if newlines > lines:
            return Tail(size, 0)
        position = size
        while position > first:
            step = min(BLOCK, position - first)
            position -= step
            block = os.pread(fd, step, position)
            count = block.count(b"\n")
            if newlines + count > lines:
                at = len(block)
                for _ in range(lines + 1 - newlines):
                    at = block.rfind(b"\n", 0, at)
                return Tail(position + at + 1, lines)
            newlines += count
    return Tail(first, newlines)


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _past_hole(fd: int, offset: int, size: int) -> int:
    """The first whole line at or after `offset` that is still kept."""
    if offset >= size:
        return offset
    try:
        data = os.lseek(fd, offset, os.SEEK_DATA)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENXIO:
            return size
        return offset  # a file system that knows no holes
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
    """Where to cut at the latest without dividing a character."""
    for cut in range(limit, limit - 4, -1):
        if cut >= len(data) or data[cut] & 0xC0 != 0x80:
            return cut
    return limit
