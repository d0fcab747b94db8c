"""The rendering of runs for a terminal: views in, Rich renderables out. Pure; the only module with colours.

Foreign text (names, messages, log lines) is never read as markup; its control characters are shown, not obeyed.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from basilica.client.views import Event, RankExit, RankStatus, RunView
from basilica.core import accounts
from basilica.core.reports import ROUND_NUMBERS
from basilica.core.world import WorldStatus

# ---- colours and signs -------------------------------------------------------------------------------------------

PHASES = {
    "pending": "yellow",
    "scheduling": "yellow",
    "pulling": "yellow",
    "starting": "yellow",
    "ready": "green",
    "degraded": "bold yellow",
    "succeeded": "bold green",
    "failed": "bold red",
    "cancelled": "magenta",
}
STATES = {
    "waiting": "yellow",
    "launched": "yellow",
    "running": "green",
    "stalled": "bold yellow",
    "stopping": "magenta",
    "succeeded": "bold green",
    "lost": "bold red",
    "dropped": "bright_black",
}
SIGNS = {
    "waiting": ("·", "."),
    "launched": ("◦", "o"),
    "running": ("■", "#"),
    "stalled": ("!", "!"),
    "stopping": ("▾", "v"),
    "succeeded": ("✓", "="),
    "lost": ("✗", "X"),
    "dropped": ("○", "-"),
}
ROLES = {"culprit": "bold red", "victim": "yellow", "stopped": "bright_black"}
RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "bright_magenta")
BAR_UP, BAR_DOWN, BAR_BELOW = "green", "bright_black", "yellow"
HEAD, DIM, WARNING, BAD, UNKNOWN = "bold", "bright_black", "yellow", "bold red", "cyan"
BAR_WIDTH = 40
NARROW = 60
FEW_RANKS = 32
EXITS_SHOWN = 16
TAIL_SHOWN = 10
TRACEBACK_SHOWN = 40
STACK_LINES_SHOWN = 40

# ---- foreign text ------------------------------------------------------------------------------------------------

# Colours are harmless and common; sequences that move the cursor, set titles or answer queries are not.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# Marks that reorder text on the screen, so that it reads differently from its content.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """Return text that cannot act on a terminal: control characters other than tab become escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c == "\t" or not _acts(c) else ascii(c)[1:-1] for c in text)


def log_line(text: str) -> str:
    """Return a log line for a terminal: without colours and text that a carriage return overwrote, else as `clean`."""
    shown = [part for part in text.split("\r") if part]
    return clean(_COLOUR.sub("", shown[-1])) if shown else ""


def _acts(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _REORDERING


# ---- values ------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format a duration: `0.4s`, `42s`, `3m12s`, `2h05m`, `3d4h`."""
    if seconds < 0:
        return "0s"
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def age(then: datetime | None, now: datetime) -> str:
    return "-" if then is None else duration(max(0, int((now - then).total_seconds())))


def clock(moment: datetime | None) -> str:
    """Format the local time of day."""
    return "-" if moment is None else moment.astimezone().strftime("%H:%M:%S")


def timestamp(moment: datetime | None) -> str:
    return "-" if moment is None else moment.astimezone().isoformat(timespec="seconds")


def phase(name: str) -> Text:
    return Text(clean(name or "unknown"), PHASES.get(name, UNKNOWN))


def rank_colour(rank: int) -> str:
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def world(size: WorldStatus) -> str:
    return f"{size.ready} of {size.target} ranks up (min {size.min}, max {size.max})"


def event_message(event: Event) -> str:
    return clean(event.message) + (f" ({event.count} times)" if event.count > 1 else "")


def message_of(view: RunView) -> str:
    """Return the message about a run: its end, else the thing that it waits for."""
    return view.message if view.is_terminal and view.message else view.blocked_on or view.message


def columns(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style=HEAD, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    return table


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the ranks that are up, and those still wanted, as wide as the room allows."""

    world: WorldStatus

    @property
    def whole(self) -> int:
        return max(self.world.target, self.world.ready, 1)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, min(BAR_WIDTH, max(self.whole, 10))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        size, whole = self.world, self.whole
        width = min(BAR_WIDTH, options.max_width, max(whole, 10))
        up = width * size.ready // whole
        if size.ready and not up:
            up = 1
        full, empty = ("#", "-") if options.ascii_only else ("█", "░")
        colour = BAR_BELOW if size.below_minimum else BAR_UP
        yield Segment(full * up, Style.parse(colour))
        yield Segment(empty * (width - up), Style.parse(BAR_DOWN))
        yield Segment.line()


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of ranks with one sign each, in rows that begin with the number of their first rank."""

    ranks: Sequence[RankStatus]
    rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label = len(str(self.ranks[-1].rank)) + 1 if self.ranks else 1
        room = max(8, options.max_width - label)
        width = next((w for w in (128, 64, 32, 16) if w <= room), room)
        ascii_only = options.ascii_only
        for start in range(0, min(len(self.ranks), width * self.rows), width):
            row = self.ranks[start : start + width]
            line = Text(f"{row[0].rank:>{label - 1}} ", DIM, no_wrap=True)
            for rank in row:
                sign = SIGNS.get(state_of(rank), ("?", "?"))[1 if ascii_only else 0]
                line.append(sign, STATES.get(state_of(rank), UNKNOWN))
            yield line
        if len(self.ranks) > width * self.rows:
            yield Text(f"and {len(self.ranks) - width * self.rows} more", DIM)


# ---- tables ------------------------------------------------------------------------------------------------------


def runs(views: Iterable[RunView], now: datetime) -> Table:
    table = columns("NAME", "PHASE", "WORLD", "AGE", "MESSAGE")
    for view in views:
        size = f"{view.world.ready}/{view.world.target}"
        table.add_row(
            Text(clean(view.name)), phase(view.phase), size, age(view.created_at, now), Text(clean(view.message))
        )
    return table


def head(view: RunView) -> Table:
    """Return the head of a run: name, phase, the world as a bar, and in words."""
    line = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(
        Text(f" {clean(view.name)} ", "bold reverse"), phase(view.phase), Bar(view.world), Text(world(view.world))
    )
    return line


def ranks_table(ranks: Sequence[RankStatus], *, narrow: bool = False) -> Table:
    noted = any(rank.note for rank in ranks)
    metric = metric_of(ranks)
    reported = () if metric is None else ("STEP", "STEPS/S", clean(metric).upper())
    agents = any(rank.agent is not None for rank in ranks)
    table = columns(
        "RANK",
        "STATE",
        *(("TORCH RANKS",) if agents else ()),
        "RESTARTS",
        *reported,
        *(() if narrow else ("NODE", *(("NOTE",) if noted else ()))),
    )
    for rank in ranks:
        cells: list[RenderableType] = [
            Text(str(rank.rank), rank_colour(rank.rank)),
            Text(clean(state_of(rank)), STATES.get(state_of(rank), UNKNOWN)),
            *([torch_ranks(rank)] if agents else []),
            Text(str(rank.restarts), WARNING if rank.restarts else ""),
        ]
        if metric is not None:
            cells += _reported(rank, metric)
        if not narrow:
            cells.append(Text(clean(rank.node or "")))
            if noted:
                cells.append(Text(clean(rank.note)))
        table.add_row(*cells)
    return table


def torch_ranks(rank: RankStatus) -> Text:
    """Return torch's ranks of the workers of a rank: `4-7`."""
    found = () if rank.agent is None else rank.agent.torch_ranks
    if not found:
        return Text("-", DIM)
    return Text(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")


def state_of(rank: RankStatus) -> str:
    """Return the state of a rank; a running rank that has stopped reporting is stalled."""
    return "stalled" if rank.stalled is not None and rank.state == "running" else rank.state


def metric_of(ranks: Iterable[RankStatus]) -> str | None:
    """Return the metric for the column: the loss, else the first one reported; None if no rank reports."""
    reports = [rank.report for rank in ranks if rank.report is not None]
    if not reports:
        return None
    names = {name for report in reports for name in report.values}
    shown = names.difference(ROUND_NUMBERS) or names.intersection(ROUND_NUMBERS[:1])
    return min(shown) if shown and "loss" not in shown else "loss"


def rate(step_seconds: float | None) -> str:
    """Format steps per second."""
    return f"{1 / step_seconds:.3g}" if step_seconds else "-"


def _reported(rank: RankStatus, metric: str) -> list[Text]:
    report = rank.report
    if report is None:
        return [Text("-", DIM)] * 3
    value = report.values.get(metric)
    return [
        Text("-" if report.step is None else str(report.step)),
        Text(rate(report.step_seconds), WARNING if rank.stalled else ""),
        Text("-" if value is None else f"{value:.4g}", "" if value is None or math.isfinite(value) else BAD),
    ]


def ranks(view: RunView, *, rows: int, narrow: bool = False) -> RenderableType:
    """Return a table if it fits into so many rows; else counts, a grid, and a table of the exceptional ranks."""
    everyone = view.ranks
    if not everyone:
        return Text("no ranks yet", DIM)
    if len(everyone) + 1 <= rows:
        return ranks_table(everyone, narrow=narrow)
    counts = Counter(state_of(rank) for rank in everyone)
    summary = Text(no_wrap=True, overflow="ellipsis")
    for state, count in counts.most_common():
        summary.append(f"{count} ")
        summary.append(clean(state), STATES.get(state, UNKNOWN))
        summary.append("  ")
    standing_out = sorted(
        (r for r in everyone if state_of(r) != counts.most_common(1)[0][0] or r.restarts),
        key=lambda r: (r.state != "lost", -r.restarts, r.rank),
    )
    grid_rows = max(1, rows // 2)
    left = rows - grid_rows - 4
    parts: list[RenderableType] = [summary, Grid(everyone, grid_rows)]
    if standing_out and left > 0:
        parts.append(ranks_table(standing_out[:left], narrow=narrow))
        if len(standing_out) > left:
            parts.append(Text(f"and {len(standing_out) - left} more that stand out", DIM))
    return Group(*parts)


def exits(ended: Sequence[RankExit], culprit: int | None) -> Table:
    """Return the table of exits; those of workers have a column for the worker and for torch's rank of it."""
    workers = any(exit.worker is not None for exit in ended)
    table = columns(
        "RANK",
        *(("WORKER", "TORCH RANK") if workers else ()),
        "CODE",
        "REASON",
        "SIGNAL",
        "ROLE",
        "RESTARTS",
        "DURATION",
        "",
    )
    for exit in ended:
        guilty = exit.rank == culprit if not workers else exit.role == "culprit"
        bad = BAD if guilty else ("" if exit.exit_code == 0 else WARNING)
        lasted = (
            "-"
            if exit.started_at is None or exit.finished_at is None
            else duration((exit.finished_at - exit.started_at).total_seconds())
        )
        table.add_row(
            Text(str(exit.rank), rank_colour(exit.rank)),
            *((_number(exit.worker), _number(exit.torch_rank)) if workers else ()),
            Text("?" if exit.exit_code < 0 else str(exit.exit_code), bad),
            Text(clean(exit.termination_reason), bad),
            Text(clean(exit.signal or "-")),
            Text(clean(exit.role or "-"), ROLES.get(exit.role or "", "")),
            str(exit.restart_count),
            lasted,
            Text("<- failed first" if guilty else "", BAD),
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def raised(ended: Sequence[RankExit]) -> list[Text]:
    """Return a line for each rank that failed with a Python exception, or through one of its workers."""
    return [rank_line(exit.rank, exit.cause or exit.error) for exit in ended if exit.cause or exit.error]


def exceptions(workers: Sequence[RankExit]) -> list[Text]:
    """Return the exceptions of workers as a whole, each after the name of its worker."""
    lines: list[Text] = []
    for exit in workers:
        told = exit.traceback.split("\n")[-TRACEBACK_SHOWN:] if exit.traceback else [exit.message][: len(exit.message)]
        if told:
            lines.append(Text(f"the exception of {clean(exit.place)}:", DIM))
            lines += [rank_line(exit.rank, line, whole=True) for line in told]
    return lines


def culprit(view: RunView, *, shown: str = "") -> RenderableType | None:
    """Return who failed first, the evidence, and its last lines. Evidence that is in `shown` is omitted."""
    if view.culprit is None:
        return None
    it = view.culprit
    lines: list[Text] = []
    if it.evidence not in shown:
        evidence = clean(it.evidence).removeprefix(f"{it.place} ")
        lines.append(Text.assemble((f"{it.place} failed first: ", BAD), f"it {evidence}"))
    if it.confidence != "high":
        lines.append(Text(f"who failed first is told with {clean(it.confidence)} confidence", WARNING))
    if it.traceback:
        lines.append(Text(f"the exception of {it.place}:", DIM))
        lines += [rank_line(it.rank, line, whole=True) for line in it.traceback.split("\n")[-TRACEBACK_SHOWN:]]
    elif it.log_tail:
        lines.append(Text(f"the last lines of {it.place}:", DIM))
        lines += [rank_line(it.rank, line, whole=True) for line in it.log_tail[-TAIL_SHOWN:]]
    return Group(*lines) if lines else None


def events(happened: Sequence[Event]) -> Table:
    table = columns("TIME", "REASON", "MESSAGE")
    for event in happened:
        colour = WARNING if event.kind == "Warning" else ""
        table.add_row(clock(event.last_at), Text(clean(event.reason), colour), Text(event_message(event)))
    return table


def event_fields(event: Event) -> str:
    """Format an event for programs: time, type, reason and message between tabs."""
    message = event_message(event).replace("\t", "\\t")
    return "\t".join([timestamp(event.last_at), clean(event.kind), clean(event.reason), message])


# ---- whole pages -------------------------------------------------------------------------------------------------


def status(view: RunView, now: datetime, *, width: int, account: Sequence[RenderableType] = ()) -> RenderableType:
    """Return the page of one run: its world, its ranks, its wait, its end, and the lines of its account."""
    about = Text(f"{clean(view.instance)}, created {age(view.created_at, now)} ago", DIM)
    parts: list[RenderableType] = [head(view), about, Text("")]
    if view.exits:
        bad = sorted(view.exits, key=lambda e: (e.role != "culprit", e.exit_code == 0, e.rank))
        parts.append(exits(bad[:EXITS_SHOWN], None if view.culprit is None else view.culprit.rank))
        if len(bad) > EXITS_SHOWN:
            parts.append(Text(f"and {len(bad) - EXITS_SHOWN} more: 'basilica train exits'", DIM))
    else:
        parts.append(ranks(view, rows=FEW_RANKS + 1, narrow=width < NARROW))
    parts += [Text(""), Text(clean(message_of(view)), "italic"), *account]
    guilty = culprit(view, shown=message_of(view))
    if guilty is not None:
        parts.append(guilty)
    return Group(*parts, *stacks(view))


def stacks(view: RunView) -> list[Text]:
    """Return the stacks of the threads of the rank that stalled first."""
    silent = [(r.stalled.since, r) for r in view.ranks if r.stalled is not None and r.stalled.stack]
    if not silent or view.is_terminal:
        return []
    _, first = min(silent, key=lambda entry: (entry[0] is None, entry[0], entry[1].rank))
    assert first.stalled is not None
    lines = first.stalled.stack.splitlines()[:STACK_LINES_SHOWN]
    return [Text(f"the threads of rank {first.rank}:", DIM), *(Text(f"  {clean(line)}") for line in lines)]


def change(view: RunView) -> str:
    """Return the state of a run in one line, for outputs that are no terminal."""
    size = view.world
    return f"{clean(view.phase or 'unknown')} {size.ready}/{size.target} {clean(message_of(view))}"


def rank_line(rank: int, line: str, *, merged: bool = True, whole: bool = False) -> Text:
    """Return a log line; the terminal wraps a `whole` one, and cuts others at its edge."""
    text = Text(no_wrap=not whole, overflow="ignore" if whole else "ellipsis")
    if merged:
        text.append(f"{rank}| ", rank_colour(rank))
    return text.append(log_line(line))


def standing(view: RunView) -> RenderableType:
    """Return the state of a live run in a sentence."""
    return Text.assemble(clean(view.name), " is ", phase(view.phase), f": {world(view.world)}")


def started(view: RunView, word: str) -> RenderableType:
    """Return the state of a run, and the next commands; `word` is its name as an argument."""
    lines: list[RenderableType] = [standing(view)]
    for command in ("watch {}", "logs -f {}", "scale {} --target N", "cancel {}"):
        lines.append(Text(f"  basilica train {command.format(clean(word))}", DIM))
    return Group(*lines)


def outcome(view: RunView) -> RenderableType:
    """Return the end of a run in a sentence, and the culprit."""
    sentence = Text.assemble(clean(view.name), " ", phase(view.phase))
    if view.message:
        sentence.append(f": {clean(view.message)}")
    return Group(sentence, blame(view))


def blame(view: RunView) -> RenderableType:
    """Return the culprit and the account alone, where the end of the run is shown already."""
    guilty = culprit(view, shown=view.message)
    account = "" if view.goodput is None else accounts.describe_end(view.goodput.figures)
    lines = [Text(account, "italic")] if account and account not in message_of(view) else []
    return Group(*([] if guilty is None else [guilty]), *lines)


def event_line(event: Event) -> Text:
    colour = WARNING if event.kind == "Warning" else DIM
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{clock(event.last_at)}  ", DIM)
    line.append(f"{clean(event.reason):20} ", colour)
    line.append(event_message(event))
    return line
