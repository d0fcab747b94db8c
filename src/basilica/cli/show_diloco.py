"""The rendering of runs in a bucket, and of plans for them, for a terminal. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from basilica.cli import show
from basilica.diloco.plan import ENOUGH_ROUNDS

if TYPE_CHECKING:
    from basilica.diloco.inspection import Inspection
    from basilica.diloco.plan import Plan, Question, StoreSpeed

ROUNDS_SHOWN = 20
SHORT_HASH = 12
OUTCOMES = {"finished": "bold green", "failed": "bold red", "stopped": "magenta"}


def size(count: float) -> str:
    """Format a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")


def run(found: "Inspection") -> RenderableType:
    """Return the page of a run: its head, the agreed state, the last rounds, and the members."""
    record = found.record
    head = Text(f"run {show.clean(found.run_id)}", "bold")
    if record is not None:
        what = show.clean(record.entrypoint or "a program of its own")
        head.append(f"  {what}, {record.world_size} replicas", "")
        if record.quorum is not None:
            head.append(f", a quorum of {record.quorum}")
        head.append(f", every {record.settings.get('sync_every')} steps")
    kept = ", ".join(f"{kind} {size(found.sizes[kind])} in {found.objects[kind]}" for kind in found.sizes)
    troubles = [Text(f"trouble: {show.clean(text)}", show.WARNING) for text in found.troubles]
    parts = [_agreed(found), Text(), _rounds(found), Text(), _members(found)]
    return Group(head, Text(f"kept: {kept}", show.DIM), *troubles, Text(), *parts)


def _agreed(found: "Inspection") -> RenderableType:
    if not found.agreed:
        return Text("no agreed state is complete: replicas would begin anew, from what rank 0 has", show.WARNING)
    table = show.columns("AGREED STATE", "ROUNDS", "SAMPLES", "SIZE", "FINGERPRINT", "CHAIN")
    for state in found.agreed:
        hashes = state.digest[:SHORT_HASH], state.chain[:SHORT_HASH] or "-"
        table.add_row(show.clean(state.name), str(state.round), f"{state.samples:g}", size(state.size), *hashes)
    return table


def _rounds(found: "Inspection") -> RenderableType:
    table = show.columns("ROUND", "FRAGMENT", "COUNTED (WEIGHT)", "UP", "DOWN", "SECONDS", "WAITED", "AT")
    for entry in found.rounds[-ROUNDS_SHOWN:]:
        counted = " ".join(f"{rank} ({weight:g})" for rank, weight in entry["weights"].items())
        table.add_row(
            str(entry["round"]),
            show.clean(entry["name"]),
            counted,
            size(entry["bytes_up"]),
            size(entry["bytes_down"]),
            f"{entry['seconds']:.2f}",
            f"{entry['waited']:.2f}",
            _moment(entry["at"]),
        )
    left_out = len(found.rounds) - ROUNDS_SHOWN
    return Group(Text(f"{left_out} earlier rounds; --json has all", show.DIM), table) if left_out > 0 else table


def _members(found: "Inspection") -> RenderableType:
    table = show.columns("RANK", "START", "HOST", "AT", "END", "ERROR")
    for member in found.members:
        table.add_row(
            Text(str(member.rank), show.rank_colour(member.rank)),
            str(member.incarnation + 1),
            show.clean(member.host),
            _moment(member.at),
            Text(member.outcome or "not told", OUTCOMES.get(member.outcome, show.DIM)),
            show.clean(member.error),
        )
    return table


def plan(found: "Plan", question: "Question") -> RenderableType:
    settings = f"sync_every={found.sync_every}"
    if found.fragments > 1:
        settings += f", fragments={found.fragments}, delay={found.delay}, mix={found.mix:g}"
    settings += f", checkpoint_every={found.checkpoint_every}"
    rows = [
        ("DiLoCo(…)", settings),
        ("ObjectStoreAllReduce(…)", f"wire={found.wire!r}" if found.wire != "fp32" else "as it is"),
        ("from a random start", "outer_lr=1.0, outer_warmup=3 as well"),
        ("utilisation", f"{found.utilisation:.1%} of the time in inner steps"),
        ("a round", f"{found.round_seconds:.3g} s" + (f", beside {found.delay} steps" if found.delay else "")),
        ("communication", f"{found.less_communication:,.0f} times less than gradients at each step"),
        ("each replica", f"{size(found.traffic.bytes_up)} up and {size(found.traffic.bytes_down)} down per interval"),
        ("all, a day", f"{size(found.bytes_per_day)} and {found.requests_per_day:,.0f} requests"),
        ("requests cost", f"${found.request_dollars_per_day:,.2f} a day"),
        ("egress costs", f"${found.egress_dollars_per_day:,.2f} a day, if replicas are outside the store's region"),
    ]
    warnings = []
    if not found.reaches_goal:
        warnings.append(f"the goal of {question.goal:.0%} is out of reach over this link; this comes nearest")
    if found.few_rounds:
        warnings.append(
            f"{question.steps:,} steps are {found.rounds} rounds, and fewer than {ENOUGH_ROUNDS} cost some percent of "
            "the loss: train longer, begin synchronously, or use a faster link"
        )
    return Group(_pairs(rows), *(Text(f"\n{warning}", show.WARNING) for warning in warnings))


def store(found: "StoreSpeed", uri: str) -> RenderableType:
    rows = [
        ("store", show.clean(uri)),
        ("small put", f"{found.put_seconds * 1000:.3g} ms"),
        ("small get", f"{found.get_seconds * 1000:.3g} ms"),
        ("list", f"{found.list_seconds * 1000:.3g} ms"),
        ("up", f"{size(found.up_bytes_per_second)} a second"),
        ("down", f"{size(found.down_bytes_per_second)} a second"),
    ]
    return _pairs(rows)


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, "bold"), Text(value))
    return table


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
