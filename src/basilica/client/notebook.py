"""The display of a handle in a notebook: a small live table. Text of a run is escaped, and cannot inject markup."""

import threading
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from basilica.client.views import RunView

_COLOURS = {"running": "#2e7d32", "succeeded": "#1b5e20", "lost": "#c62828", "dropped": "#757575"}
_WAITING = "#b26a00"
_RANKS_SHOWN = 64


def table(view: RunView) -> str:
    world = view.world
    rows = "".join(
        f"<tr><td>{rank.rank}</td><td style='color:{_COLOURS.get(rank.state, _WAITING)}'>{escape(rank.state)}</td>"
        f"<td>{rank.restarts}</td><td>{escape(rank.node or '')}</td></tr>"
        for rank in view.ranks[:_RANKS_SHOWN]
    )
    more = len(view.ranks) - _RANKS_SHOWN
    if more > 0:
        rows += f"<tr><td colspan='4'>and {more} more</td></tr>"
    return (
        f"<div><b>{escape(view.name)}</b> ({escape(view.instance)}): <b>{escape(view.phase)}</b>, "
        f"{world.ready} of {world.target} ranks up (min {world.min}, max {world.max})<br>"
        f"<i>{escape(view.blocked_on or view.message)}</i>"
        f"<table><tr><th>rank</th><th>state</th><th>restarts</th><th>node</th></tr>{rows}</table></div>"
    )


def show_live(first: RunView, changes: Iterable[object]) -> threading.Thread:
    """Display the table and keep it current until the run has ended; a cell that runs again displays another table."""
    from IPython.display import HTML, display  # noqa: PLC0415 (installed where a notebook is, and needed only there)

    as_html: Callable[[str], Any] = HTML
    shown: Any = display(as_html(table(first)), display_id=True)  # type: ignore[no-untyped-call]

    def keep_current() -> None:
        for change in changes:
            if isinstance(change, RunView):
                shown.update(as_html(table(change)))

    thread = threading.Thread(target=keep_current, name="basilica-notebook", daemon=True)
    thread.start()
    return thread
