"""`basilica train metrics`: the series that the ranks of a run reported."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basilica.cli.common import Json
from basilica.cli.train.common import Name, handle

if TYPE_CHECKING:
    from basilica.client.views import Series

PICTURE_POINTS = 600


def metrics(
    name: Name,
    *,
    metric: Annotated[str | None, typer.Option(help="Show only this metric, such as loss.", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option(help="Show only this rank.", min=0, show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of the series to this file, as SVG.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the metrics that ranks reported: last values, ranges and curves.

    Ranks report them with `basilica.report`.

    \b
    Examples:
      basilica train metrics llama
      basilica train metrics llama --metric loss --plot loss.svg
    """
    from basilica.cli import metrics as pictures
    from basilica.cli import terminal
    from basilica.core.reports import ROUND_NUMBERS

    training = handle(name)
    points = PICTURE_POINTS if plot is not None or as_json else pictures.CURVE_WIDTH
    series = [s for s in training.series(metric, rank, points=points) if s.points]
    if as_json:
        terminal.write_json({"series": [_series(s) for s in series]})
    elif not series:
        what = "nothing" if metric is None else f"no {metric!r}"
        terminal.notify(f"the ranks have reported {what} so far; they do with basilica.report(step=…, loss=…)")
    else:
        asked = [s for s in series if metric is not None or s.metric not in ROUND_NUMBERS]
        if asked:
            screen = terminal.console(sys.stdout)
            terminal.show(pictures.table(asked, training.ranks, ascii_only=screen.options.ascii_only))
        if len(asked) < len(series):
            example = ROUND_NUMBERS[0]
            terminal.notify(f"there are DiLoCo rounds: basilica console {name} shows them, or --metric {example}")
    if plot is not None:
        _draw(series, training.friendly_name, plot)


def _series(series: "Series") -> dict[str, Any]:
    """Return the series as the server sends it: a value that is not finite is a string."""
    import math

    from basilica.cli import show

    def plain(value: float) -> float | str:
        names = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return value if math.isfinite(value) else names.get(value, "NaN")

    points = [
        {"step": p.step, "at": show.timestamp(p.at), "value": plain(p.value), "min": plain(p.min), "max": plain(p.max)}
        | {"count": p.count}
        for p in series.points
    ]
    return asdict(series) | {"points": points}


def _draw(series: "list[Series]", title: str, path: Path) -> None:
    from basilica.cli import metrics as pictures
    from basilica.cli.terminal import notify
    from basilica.core.errors import BasilicaError

    if not series:
        notify("there is nothing to draw yet")
        return
    try:
        path.write_text(pictures.picture(series, title), encoding="utf-8")
    except OSError as error:
        raise BasilicaError(f"cannot draw into {path}: {error.strerror or error}") from error
