"""The live view of a run: in a terminal it redraws itself, elsewhere it is one line per change.

The server pushes changes; nothing polls on a timer. Signals and keys are interruptions that come on one queue.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rich.live import Live

from basilica.cli import show, show_live
from basilica.cli.terminal import console, is_plain, stdin_is_terminal, write_json, write_line
from basilica.cli.train.common import now
from basilica.client.effects import NoAnswer
from basilica.client.training import DistributedTraining
from basilica.client.views import Event, RunView
from basilica.core.errors import BasilicaError

REDRAW_SECONDS = 0.1  # however fast a run changes
RESIZED_SECONDS = (0.02, 0.5)
LINES_KEPT = 100


class Interruption(StrEnum):
    """A request of the user, or a time limit, that ends the wait for a run."""

    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    CANCEL = "cancel"
    TIME_IS_UP = "time is up"


class Display(Protocol):
    """The receiver of a run's changes."""

    wants_events: bool
    wants_lines: bool
    wants_reports: bool

    def state(self, view: RunView) -> None: ...
    def trouble(self, problem: str) -> None: ...
    def events(self, happened: list[Event]) -> None: ...
    def line(self, rank: int, line: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


# ---- displays ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Silent:
    """A display that shows nothing, for a caller that only waits for the end."""

    wants_events: bool = False
    wants_lines: bool = False
    wants_reports: bool = False

    def state(self, view: RunView) -> None:
        pass

    def trouble(self, problem: str) -> None:
        pass

    def events(self, happened: list[Event]) -> None:
        pass

    def line(self, rank: int, line: str) -> None:
        pass

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


@dataclass(slots=True)
class Lines(Silent):
    """One line per change, unless it equals the last line."""

    last: str = ""

    def state(self, view: RunView) -> None:
        line = show.change(view)
        if line != self.last:
            self.last = line
            write_line(f"{show.timestamp(now())} {line}")


@dataclass(slots=True)
class JsonStates(Silent):
    """The server's answer at every change, one per line."""

    def state(self, view: RunView) -> None:
        write_json(view.raw)


@dataclass(slots=True)
class Logs(Silent):
    """The output of the ranks, unchanged."""

    wants_lines: bool = True
    as_json: bool = False
    prefix: bool = True

    def line(self, rank: int, line: str) -> None:
        if self.as_json:
            write_json({"rank": rank, "line": line})
        else:
            write_line(f"{rank}| {line}" if self.prefix else line)


@dataclass(slots=True)
class Screen:
    """The live view. It is drawn at most ten times a second, and fits the terminal at any size."""

    keys: str = ""
    wants_lines: bool = False
    wants_events: bool = True
    wants_reports: bool = True
    _view: RunView | None = None
    _happened: list[Event] = field(default_factory=list)
    _lines: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    _trouble: str = ""
    _live: Live = field(default_factory=lambda: Live(auto_refresh=False))
    _drawn_at: float = -1.0
    _due: asyncio.TimerHandle | None = None
    _paused: bool = False

    def state(self, view: RunView) -> None:
        self._view, self._trouble = view, ""
        self.draw()

    def trouble(self, problem: str) -> None:
        self._trouble = problem
        self.draw()

    def events(self, happened: list[Event]) -> None:
        self._happened = happened
        self.draw()

    def line(self, rank: int, line: str) -> None:
        self._lines.append((rank, line))
        self.draw()

    def draw(self) -> None:
        """Draw now, or once `REDRAW_SECONDS` have passed since the last drawing."""
        loop = asyncio.get_running_loop()
        if self._due is None and not self._paused:
            self._due = loop.call_at(max(loop.time(), self._drawn_at + REDRAW_SECONDS), self._draw)

    def resized(self) -> None:
        """Draw again after a moment: the kernel signals before it stores the new size, so a drawing now may miss it."""
        loop = asyncio.get_running_loop()
        for delay in RESIZED_SECONDS:
            loop.call_later(delay, self.draw)

    def _draw(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None
        if self._view is None or self._paused:
            return
        self._drawn_at = asyncio.get_running_loop().time()
        self._live.update(self._frame(self.keys), refresh=True)

    def _frame(self, keys: str) -> Any:
        assert self._view is not None
        size = self._live.console.size
        lines = list(self._lines) if self.wants_lines else None
        frame = show_live.Frame(view=self._view, events=self._happened, lines=lines, trouble=self._trouble, keys=keys)
        return show_live.screen(frame, width=size.width, height=size.height)

    def pause(self) -> None:
        """Stop drawing, with the last state on the terminal and without the line of keys."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._view is not None and not self._paused:
            self._live.update(self._frame(""), refresh=True)
        self._paused = True
        self._live.stop()

    def resume(self) -> None:
        """Draw again, below the text that was printed since."""
        self._paused, self._live = False, _new_live()
        self._live.start()
        if self._view is not None:
            self.draw()


def _new_live() -> Live:
    return Live(console=console(sys.stdout), auto_refresh=False, vertical_overflow="crop")


# ---- following ---------------------------------------------------------------------------------------------------


@contextmanager
def displayed(display: Display) -> Iterator[None]:
    display.resume()
    try:
        yield
    finally:
        display.pause()


async def follow(training: DistributedTraining, display: Display) -> RunView:
    """Show every change until the run is settled; return its last state."""
    lines = asyncio.create_task(_show_lines(training, display)) if display.wants_lines else None
    version = -1
    try:
        async with aclosing(training.changes_async(reports=display.wants_reports)) as changes:
            async for change in changes:
                if isinstance(change, NoAnswer):
                    display.trouble(change.problem)
                    continue
                display.state(change)
                if display.wants_events and change.version != version:  # else ranks have only reported
                    version = change.version
                    with suppress(BasilicaError):  # the view goes on without them
                        display.events(await training.events_async(limit=show_live.EVENTS_SHOWN))
        if lines is not None:
            await lines
        return training.view
    finally:
        if lines is not None:
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)


async def _show_lines(training: DistributedTraining, display: Display) -> None:
    async with aclosing(training.stream_logs_async()) as lines:
        async for rank, line in lines:
            display.line(rank, line)


# ---- signals and keys --------------------------------------------------------------------------------------------


@contextmanager
def interruptions(on_resize: Callable[[], None] | None = None) -> Iterator[asyncio.Queue[str]]:
    """Yield the queue of signals and, at a terminal, single keys. A signal that the parent set to ignored stays so."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    taken = [
        (number, interruption)
        for number, interruption in ((signal.SIGINT, Interruption.INTERRUPT), (signal.SIGTERM, Interruption.TERMINATE))
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number, interruption in taken:
        loop.add_signal_handler(number, queue.put_nowait, interruption)
    if on_resize is not None:
        loop.add_signal_handler(signal.SIGWINCH, on_resize)
    try:
        with _keys(loop, queue):
            yield queue
    finally:
        for number, _ in taken:
            loop.remove_signal_handler(number)
        if on_resize is not None:
            loop.remove_signal_handler(signal.SIGWINCH)


@contextmanager
def _keys(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[str]) -> Iterator[None]:
    """Read single keys without echo; restore the terminal at the end."""
    fd = sys.stdin.fileno() if stdin_is_terminal() else None
    if fd is None or is_plain(sys.stdout) or os.tcgetpgrp(fd) != os.getpgrp():
        yield
        return
    before = termios.tcgetattr(fd)

    def grab() -> None:
        tty.setcbreak(fd, termios.TCSANOW)

    def read() -> None:
        data = os.read(fd, 64)
        if not data:  # the terminal is gone
            loop.remove_reader(fd)
        for key in data.decode("ascii", "ignore"):
            queue.put_nowait(key)

    grab()
    loop.add_reader(fd, read)
    loop.add_signal_handler(signal.SIGCONT, grab)  # a shell resumes us with its own terminal settings
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCONT)
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def end_or_interruption(
    end: asyncio.Task[RunView], queue: asyncio.Queue[str], left: float | None
) -> RunView | str:
    """Return the first of: the end of the run, an interruption, the end of the time."""
    interruption = asyncio.create_task(queue.get())
    try:
        done, _ = await asyncio.wait({end, interruption}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        interruption.cancel()
    if end in done:
        return end.result()
    return interruption.result() if interruption in done else Interruption.TIME_IS_UP
