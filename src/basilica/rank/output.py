"""What a rank writes, passed on by its entrypoint, so that the last lines are known when it ends."""

import asyncio
import contextlib
import os
import sys
from collections import deque

LINES_KEPT, LINE_CHARS_MAX = 20, 500


class Output:
    """What the rank writes, passed on to our own output; the last lines are remembered."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._lines: deque[bytes] = deque(maxlen=LINES_KEPT)
        self._rest = b""
        asyncio.get_running_loop().add_reader(self._reading, self._pass_on)

    def started(self) -> None:
        """The rank has its end of the pipe."""
        os.close(self.writing)

    def _pass_on(self) -> bool:
        try:
            piece = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return False
        if not piece:
            asyncio.get_running_loop().remove_reader(self._reading)
            return False
        _write_all(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._lines.extend(line[: 4 * LINE_CHARS_MAX] for line in lines)
        self._rest = self._rest[-(1 << 16) :]
        return True

    def finish(self) -> tuple[str, ...]:
        """The last lines, once the rank has ended; what it left behind may hold the pipe open and is not waited for."""
        while self._pass_on():
            pass
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        last = [*self._lines, *([self._rest] if self._rest else [])][-LINES_KEPT:]
        return tuple(line.decode(errors="replace")[:LINE_CHARS_MAX] for line in last)


def _write_all(piece: bytes) -> None:
    with contextlib.suppress(OSError):
        while piece:
            piece = piece[os.write(sys.stdout.fileno(), piece) :]
