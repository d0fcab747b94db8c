"""The rendering of a run's account for a terminal: a bar by cause, a table, and the incidents with their cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from basilica.cli.show import BAD, DIM, HEAD, UNKNOWN, WARNING, clean, clock, columns, head
from basilica.client.views import Goodput, Incident, PlannedChange, RunView
from basilica.core import accounts
from basilica.core.notices import describe_change
from basilica.core.policy import name_ranks

# A cause is told by its sign where there are no colours. The signs of losses are letters, so that gaps stand out.
CAUSES = {
    "training": ("█", "#", "green"),
    "finished": ("▓", "=", "bright_green"),
    "unattributed": ("░", "?", "bright_black"),
    "queued": ("Q", "Q", "yellow"),
    "starting": ("S", "S", "cyan"),
    "rendezvous": ("R", "R", "blue"),
    "restoring": ("L", "L", "bright_blue"),
    "recomputing": ("A", "A", "magenta"),
    "snapshotting": ("N", "N", "bright_magenta"),
    "stalled": ("!", "!", "bold yellow"),
    "degraded": ("X", "X", "bold red"),
    "changing": ("C", "C", "bright_yellow"),
}
_OTHER = ("·", ".", UNKNOWN)
BAR_WIDTH = 72
INCIDENTS_SHOWN = 20


def cells(seconds: Sequence[float], width: int) -> list[int]:
    """Divide so many cells in proportion; whatever there is of a part has at least one, as long as there is room."""
    whole = sum(seconds)
    if whole <= 0:
        return [0] * len(seconds)
    exact = [width * part / whole for part in seconds]
    given = [max(1, int(share)) if part > 0 else 0 for part, share in zip(seconds, exact, strict=True)]
    while sum(given) > width and max(given) > 0:
        given[max(range(len(given)), key=lambda n: given[n])] -= 1
    while sum(given) < width:
        given[max(range(len(given)), key=lambda n: exact[n] - given[n])] += 1
    return given


@dataclass(frozen=True, slots=True)
class CauseBar:
    """A bar of all causes, each as long as its share of the time."""

    goodput: Goodput

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        causes = ordered(self.goodput)
        parts = cells([self.goodput.seconds[cause] for cause in causes], min(BAR_WIDTH, options.max_width))
        for cause, width in zip(causes, parts, strict=True):
            wide, narrow, colour = CAUSES.get(cause, _OTHER)
            yield Segment((narrow if options.ascii_only else wide) * width, Style.parse(colour))
        yield Segment.line()


def ordered(goodput: Goodput) -> list[str]:
    """Return the causes that there are: work first, and then losses by their size."""
    present = [cause for cause, seconds in goodput.seconds.items() if seconds > 0]
    work = [cause for cause in ("training", "finished", "unattributed") if cause in present]
    return work + sorted((c for c in present if c not in work), key=lambda cause: -goodput.seconds[cause])


def page(view: RunView, goodput: Goodput, now: datetime) -> RenderableType:
    """Return the page of a run's account."""
    parts: list[RenderableType] = [head(view), Text(str(goodput), HEAD)]
    if goodput.rank_seconds > 0:
        parts += [Text(""), CauseBar(goodput), Text(""), Signs(goodput)]
    if goodput.steps_recomputed:
        parts += [Text(""), Text(f"{_steps(goodput.steps_recomputed)} taken again after incidents", WARNING)]
    shown = view.incidents[-INCIDENTS_SHOWN:]
    if shown:
        parts += [Text(""), Text("INCIDENTS", HEAD)]
        parts += [line for incident in shown for line in incident_lines(incident, now)]
    if view.notice is not None:
        parts += [Text(""), notice_line(view.notice, now)]
    advice = accounts.advice(goodput.figures)
    if advice and not view.is_terminal:
        parts += [Text(""), Text(advice, "italic")]
    elif advice:
        parts += [Text(""), Text(f"next time, {advice}", "italic")]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class Signs:
    """The table of causes, each with its sign in the bar."""

    goodput: Goodput

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield causes_table(self.goodput, ascii_only=options.ascii_only)


def causes_table(goodput: Goodput, *, ascii_only: bool = False) -> Table:
    gpus = goodput.gpus_per_rank
    table = columns("", "CAUSE", "RANK TIME", "SHARE", *(("GPU TIME",) if gpus else ()))
    for column in table.columns[2:]:
        column.justify = "right"
    for cause in ordered(goodput):
        seconds = goodput.seconds[cause]
        wide, narrow, colour = CAUSES.get(cause, _OTHER)
        table.add_row(
            Text(narrow if ascii_only else wide, colour),
            Text(clean(cause)),
            accounts.duration(seconds),
            f"{accounts.percent(seconds / goodput.rank_seconds)} %",
            *((accounts.duration(seconds * gpus),) if gpus else ()),
        )
    return table


def incident_lines(incident: Incident, now: datetime) -> list[Text]:
    """Return an incident: when, how long, its cost; and what it was."""
    line = Text()
    line.append(f"#{incident.number} {clock(incident.at)} ", DIM)
    line.append(clean(incident.kind), BAD if incident.kind in ("failure", "stall", "loss") else WARNING)
    since = None if incident.at is None else ((incident.over_at or now) - incident.at).total_seconds()
    took = "" if since is None else accounts.duration(since)
    line.append(f", goes on for {took}, so far " if incident.is_open else f", over after {took}, ")
    line.append(f"cost {accounts.duration(incident.cost_seconds)} of ranks")
    if incident.cost_gpu_seconds:
        line.append(f" ({accounts.duration(incident.cost_gpu_seconds)} of GPUs)")
    if incident.steps_recomputed:
        line.append(f", {_steps(incident.steps_recomputed)} again")
    if incident.failures > 1:
        line.append(f", {incident.failures} failures")
    return [line, Text(f"   {clean(incident.what)}")] if incident.what else [line]


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def notice_line(notice: PlannedChange, now: datetime) -> Text:
    """Return the countdown to a planned change, and the ranks that it waits for."""
    what = clean(describe_change(notice.kind, notice.target, notice.reason))
    if notice.done_at is not None:
        return Text.assemble(("announced: ", WARNING), f"{what}, which is under way")
    left = "" if notice.until is None else f" in {accounts.duration((notice.until - now).total_seconds())} at most"
    at = "" if notice.step is None else f", after step {notice.step}"
    ranks = f"; {name_ranks(notice.waiting_for)} not ready yet" if notice.waiting_for else ""
    return Text.assemble(("announced: ", WARNING), f"{what}{left}{at}{ranks}")


def summary(view: RunView, now: datetime) -> list[RenderableType]:
    """Return the lines of the account on the page of a run: goodput, the open incident, the planned change."""
    lines: list[RenderableType] = []
    if view.goodput is not None and view.goodput.rank_seconds > 0:
        lines.append(Text(str(view.goodput), DIM))
    if view.incidents and view.incidents[-1].is_open:
        lines += incident_lines(view.incidents[-1], now)
    if view.notice is not None:
        lines.append(notice_line(view.notice, now))
    return lines
