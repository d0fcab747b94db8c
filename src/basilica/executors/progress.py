"""The progress of replicas: in a terminal a table that redraws itself, elsewhere one line per change."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from basilica.executors.protocol import (
    CANCELLED,
    ENDED,
    FAILED,
    PENDING,
    RUNNING,
    STATUSES,
    SUCCEEDED,
    OnChange,
    ReplicaHandle,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS = {
    PENDING: "yellow",
    RUNNING: "green",
    SUCCEEDED: "bold green",
    FAILED: "bold red",
    CANCELLED: "magenta",
}
REDRAWS_PER_SECOND = 8
ROWS_BESIDE_RANKS = 4


@contextmanager
def live_table(
    handles: Sequence[ReplicaHandle], *, stream: TextIO | None = None, title: str = ""
) -> Iterator[OnChange]:
    """Yield a callback for `collect(on_change=…)`, valid in the block.

    >>> with live_table(handles) as on_change:                               # doctest: +SKIP
    ...     results = executor.collect(handles, on_change=on_change)
    """
    out = sys.stderr if stream is None else stream
    board = Board(handles, title)
    if not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":

        def write_line(handle: ReplicaHandle, status: str) -> None:
            board.change(handle, status)
            if status != PENDING:
                out.write(f"rank {handle.rank} {status}\n")
                out.flush()

        yield write_line
        return
    from rich.console import Console  # noqa: PLC0415  only for terminals
    from rich.live import Live  # noqa: PLC0415

    screen = Console(file=out, markup=False, highlight=False, emoji=False)
    with Live(board, console=screen, refresh_per_second=REDRAWS_PER_SECOND, vertical_overflow="crop"):
        yield board.change


class Board:
    """The table of replicas for Rich: a row for each while they fit, else counts and the replicas that differ."""

    def __init__(self, handles: Sequence[ReplicaHandle], title: str = "") -> None:
        now = time.monotonic()
        self._title = title
        self._states: dict[int, tuple[str, float, float | None]] = {h.rank: (PENDING, now, None) for h in handles}

    def change(self, handle: ReplicaHandle, status: str) -> None:
        _, since, _ = self._states.get(handle.rank, ("", time.monotonic(), None))
        self._states[handle.rank] = (status, since, time.monotonic() if status in ENDED else None)

    def __rich_console__(self, console: Any, options: Any) -> Iterator["RenderableType"]:
        from rich.text import Text  # noqa: PLC0415

        counts = Counter(status for status, _, _ in self._states.values())
        summary = Text(f"{self._title}  " if self._title else "", "bold", no_wrap=True, overflow="ellipsis")
        for status in STATUSES:
            if counts[status]:
                summary.append(f"{counts[status]} {status}  ", COLOURS[status])
        yield summary
        rows = max(3, (options.height or console.size.height) - ROWS_BESIDE_RANKS)
        shown = sorted(self._states)
        if len(shown) > rows:
            usual = counts.most_common(1)[0][0]
            shown = [rank for rank in shown if self._states[rank][0] != usual][:rows]
        yield self._table(shown)
        if len(shown) < len(self._states):
            yield Text(f"and {len(self._states) - len(shown)} more", "bright_black")

    def _table(self, ranks: Sequence[int]) -> "RenderableType":
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for heading in ("RANK", "STATUS", "TIME"):
            table.add_column(heading, no_wrap=True)
        now = time.monotonic()
        for rank in ranks:
            status, since, ended = self._states[rank]
            table.add_row(str(rank), Text(status, COLOURS.get(status, "")), f"{(ended or now) - since:.1f}s")
        return table
