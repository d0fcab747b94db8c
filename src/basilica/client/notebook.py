"""The display of a handle in a notebook: a small live table. Text of a run is escaped, and cannot inject markup."""

import threading
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from basilica.client.views import Goodput, RankStatus, RunView
from basilica.core import accounts

_COLOURS = {"running": "#2e7d32", "succeeded": "#1b5e20", "lost": "#c62828", "dropped": "#757575"}
_WAITING = "#b26a00"
_RANKS_SHOWN = 64
_CAUSES = {"training": "#2e7d32", "finished": "#1b5e20", "unattributed": "#9e9e9e"}
_LOSS = "#c62828"


def table(view: RunView) -> str:
    world = view.world
    rows = "".join(_row(rank) for rank in view.ranks[:_RANKS_SHOWN])
    more = len(view.ranks) - _RANKS_SHOWN
    if more > 0:
        rows += f"<tr><td colspan='5'>and {more} more</td></tr>"
    goodput = "" if view.goodput is None else f"{escape(str(view.goodput))}<br>"
    return (
        f"<div><b>{escape(view.name)}</b> ({escape(view.instance)}): <b>{escape(view.phase)}</b>, "
        f"{world.ready} of {world.target} ranks up (min {world.min}, max {world.max})<br>"
        f"<i>{escape(view.blocked_on or view.message)}</i><br>{goodput}"
        "<table><tr><th>rank</th><th>state</th><th>time goes to</th><th>restarts</th><th>node</th></tr>"
        f"{rows}</table></div>"
    )


def _row(rank: RankStatus) -> str:
    return (
        f"<tr><td>{rank.rank}</td><td style='color:{_COLOURS.get(rank.state, _WAITING)}'>{escape(rank.state)}</td>"
        f"<td>{escape(rank.cause)}</td><td>{rank.restarts}</td><td>{escape(rank.node or '')}</td></tr>"
    )


def goodput_table(goodput: Goodput) -> str:
    """Return the account of a run as a table of its causes, with a bar for the share of each."""
    whole = goodput.rank_seconds or 1.0
    rows = "".join(
        f"<tr><td>{escape(cause)}</td><td>{accounts.duration(seconds)}</td><td>{100 * seconds / whole:.1f} %</td>"
        f"<td><div style='background:{_CAUSES.get(cause, _LOSS)};height:0.8em;width:{100 * seconds / whole:.0f}px'>"
        "</div></td></tr>"
        for cause, seconds in sorted(goodput.seconds.items(), key=lambda entry: -entry[1])
        if seconds > 0
    )
    head = "<tr><th>cause</th><th>of all ranks</th><th>share</th><th></th></tr>"
    return f"<div>{escape(str(goodput))}<table>{head}{rows}</table></div>"


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
