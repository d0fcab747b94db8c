"""The output of commands: stdout for facts, stderr for everything else; plain where no person watches.

Plain means no colours and no redrawing: stdout is no terminal, or NO_COLOR is set, or the terminal can do neither.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

PIPE_WIDTH = 2000  # lines are not cut for a program that reads
QUIET_SECONDS = 1.0  # an operation that takes longer shows a spinner


def is_plain(stream: TextIO) -> bool:
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def can_ask() -> bool:
    """Return whether a person at the terminal can see and answer a question."""
    return stdin_is_terminal() and not is_plain(sys.stdout)


def stdin_is_terminal() -> bool:
    """Return whether stdin is a terminal; False, too, if the process was started without stdin."""
    stdin: TextIO | None = sys.stdin
    return stdin is not None and not stdin.closed and stdin.isatty()


def console(stream: TextIO) -> Console:
    plain = is_plain(stream)
    return Console(
        file=stream,
        force_terminal=not plain,
        no_color=plain,
        width=None if stream.isatty() else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def show(renderable: RenderableType, stream: TextIO | None = None) -> None:
    out = sys.stdout if stream is None else stream
    screen = console(out)
    if not is_plain(out):
        screen.print(renderable)
        return
    with screen.capture() as captured:
        screen.print(renderable)
    out.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    out.flush()


def notify(text: str) -> None:
    """Print a remark for people to stderr; facts go to stdout."""
    show(Text(text), sys.stderr)


def write_line(line: str) -> None:
    write_text(line + "\n", sys.stdout)


def write_text(text: str, stream: TextIO) -> None:
    """Write text unchanged, whatever the locale can encode."""
    stream.flush()
    stream.buffer.write(text.encode("utf-8", "replace"))
    stream.buffer.flush()


def write_json(document: Any) -> None:
    write_line(json.dumps(document, ensure_ascii=True, default=str))


@contextmanager
def busy(text: Callable[[], str]) -> Iterator[None]:
    """If the block takes longer than a second, show its progress in a line that disappears at the end."""
    if is_plain(sys.stderr):
        yield
        return
    screen = console(sys.stderr)
    status = screen.status(_Changing(text))
    lock = threading.Lock()
    over = False

    def begin() -> None:
        with lock:
            if not over:
                status.start()

    timer = threading.Timer(QUIET_SECONDS, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            status.stop()


@contextmanager
def uploading(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes done of bytes to do, which disappears at the end."""
    if is_plain(sys.stderr):
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=None, visible=False)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        yield advance


class _Changing:
    """A text that is computed whenever it is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._text(), no_wrap=True, overflow="ellipsis")
