"""The output of a rank, relayed by its agent, so that the last lines are known when the rank ends."""

import asyncio
import contextlib
import os
import sys
from collections import deque

from basilica.runtimes.rules import TAIL_LINE_CHARS, TAIL_LINES, tail_of

PIECES_AT_ONCE = 16


class Output:
    """A pipe from the rank to the output of this process; its last lines are kept."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._rest = b""
        asyncio.get_running_loop().add_reader(self._reading, self._relay)

    def started(self) -> None:
        """Close the writing end: the rank has its own copy."""
        os.close(self.writing)

    def _relay(self) -> bool:
        try:
            piece = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return False
        if not piece:
            asyncio.get_running_loop().remove_reader(self._reading)
            return False
        _write_all(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._lines.extend(line[: 4 * TAIL_LINE_CHARS] for line in lines)
        self._rest = self._rest[-(1 << 16) :]
        return True

    def tail(self) -> tuple[str, ...]:
        """Return the last lines that the rank has written up to now; a part of those of one that writes without end."""
        for _ in range(PIECES_AT_ONCE):
            if not self._relay():
                break
        return self._tail()

    def finish(self) -> tuple[str, ...]:
        """Return the last lines of a rank that has ended. Orphans that keep the pipe open are not waited for."""
        while self._relay():
            pass
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        return self._tail()

    def _tail(self) -> tuple[str, ...]:
        last = [*self._lines, *([self._rest] if self._rest else [])]
        return tail_of([line.decode(errors="replace") for line in last])


def _write_all(piece: bytes) -> None:
    with contextlib.suppress(OSError):
        while piece:
            piece = piece[os.write(sys.stdout.fileno(), piece) :]
