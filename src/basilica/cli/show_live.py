"""The rendering of the live view of a run, which is redrawn in place."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from basilica.cli.show import BAD, DIM, NARROW, clean, event_line, head, message_of, rank_line, ranks
from basilica.client.views import Event, RunView

EVENTS_SHOWN = 6
LOG_LINES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The content of the live view."""

    view: RunView
    events: Sequence[Event] = ()
    lines: Sequence[tuple[int, str]] | None = None
    trouble: str = ""
    keys: str = ""


def screen(frame: Frame, *, width: int, height: int) -> RenderableType:
    """Return the live view, never higher than the terminal: a view that scrolls cannot be redrawn in place."""
    view = frame.view
    top: list[RenderableType] = [head(view), _one_line(clean(message_of(view)), "italic"), Text("")]
    bottom: list[RenderableType] = []
    room = height - len(top) - 2  # the cursor's line and the line of keys
    happened = [*reversed(frame.events[: min(EVENTS_SHOWN, max(0, room // 3 - 1))])]
    if happened:
        bottom += [Text(""), *(event_line(event) for event in happened)]
    if frame.lines is not None and room > 12:
        shown = frame.lines[-min(LOG_LINES_SHOWN, room // 3) :]
        bottom += [Text(""), *(rank_line(rank, line) for rank, line in shown)]
    if frame.trouble:
        bottom += [_one_line(f"no answer from the server, trying again: {clean(frame.trouble)}", BAD)]
    if frame.keys:
        bottom += [_one_line(frame.keys, DIM)]
    rows = max(4, room - len(bottom))
    return Group(*top, ranks(view, rows=rows, narrow=width < NARROW), *bottom)


def _one_line(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
