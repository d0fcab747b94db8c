"""`basilica` at a terminal: a pseudo-terminal of our own, read until what is waited for appears."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support.server import SECONDS, clean_environment

CTRL_C = "\x03"
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


class Terminal:
    """`seen` is all that was drawn, with escape sequences; `text` is it without."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], *, rows: int = 30, columns: int = 100) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "basilica.cli.main", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),  # noqa: PLW1509  one ioctl, nothing more
            env=clean_environment() | {"TERM": "xterm-256color"} | dict(env),
        )
        self._theirs = theirs
        self.seen = ""

    @property
    def text(self) -> str:
        return _ESCAPE.sub("", self.seen)

    @property
    def modes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, pattern: str) -> str:
        """What was drawn since the last call, up to the pattern."""
        start, deadline = len(self.text), time.monotonic() + SECONDS
        while re.search(pattern, self.text[start:]) is None:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not appear in\n{self.text[start:]}"
            self.seen += os.read(self._ours, 65536).decode("utf-8", "replace")
        return self.text[start:]

    def wait(self) -> int:
        """Its exit code; what it still draws is read."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it has not ended\n{self.text}"
            self._read(0.02)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        self.seen += os.read(self._ours, 65536).decode("utf-8", "replace")
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def at_terminal(*arguments: str, env: Mapping[str, str], rows: int = 30, columns: int = 100) -> Iterator[Terminal]:
    terminal = Terminal(list(arguments), env, rows=rows, columns=columns)
    try:
        yield terminal
    finally:
        terminal.close()
