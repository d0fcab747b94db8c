"""The commands that read runs: `ls`, `status`, `logs`, `events`, `exits`, `why`, `goodput`, `checkpoints`, `bench`."""

import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basilica.cli.common import Json
from basilica.cli.train.common import Name, client, handle, now

if TYPE_CHECKING:
    from basilica.client.views import Event, RunView


def ls(
    live: Annotated[bool, typer.Option("--live", help="List only runs that have not ended.")] = False,
    as_json: Json = False,
) -> None:
    """List runs, newest first; `ps` is the same command.

    \b
    Examples:
      basilica train ls
      basilica train ls --live --json
    """
    from basilica.cli import show, terminal

    with terminal.busy(lambda: "asking the server"):
        views = [view for view in client().list() if not (live and view.is_terminal)]
    if as_json:
        terminal.write_json([view.raw for view in views])
    elif views:
        terminal.show(show.runs(views, now()))
    else:
        terminal.notify("no run is live" if live else "no runs yet: 'basilica train up --help' says how to start one")


def ps(
    live: Annotated[bool, typer.Option("--live", help="List only runs that have not ended.")] = False,
    as_json: Json = False,
) -> None:
    """List runs, newest first; the same command as `ls`.

    \b
    Example:
      basilica train ps --live
    """
    ls(live=live, as_json=as_json)


def status(name: Name, as_json: Json = False) -> None:
    """Show the state of a run and of its ranks, and after its end the exits and the culprit.

    \b
    Example:
      basilica train status llama
    """
    from basilica.cli import show, terminal
    from basilica.cli.show_goodput import summary

    view = handle(name).view
    if as_json:
        terminal.write_json(view.raw)
    else:
        width = terminal.console(sys.stdout).width
        terminal.show(show.status(view, now(), width=width, account=summary(view, now())))


def why(name: Name, as_json: Json = False) -> None:
    """Explain in one sentence what a run waits for, or how it ended.

    \b
    Example:
      basilica train why llama
    """
    from basilica.cli import show, terminal

    training = handle(name)
    sentence = training.why()
    if as_json:
        terminal.write_json({"name": training.name, "phase": training.phase, "why": sentence})
    else:
        terminal.write_line(show.clean(sentence))


def logs(
    name: Name,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run has ended.")] = False,
    rank: Annotated[list[int] | None, typer.Option(help="Print only this rank; repeatable.", min=0)] = None,
    tail: Annotated[int | None, typer.Option(help="Print only this number of last lines of each rank.", min=0)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Keep control characters at a terminal.")] = False,
    as_json: Json = False,
) -> None:
    """Print the logs of ranks; lines of several ranks are merged, with the prefix `rank| `.

    At a terminal, control characters are removed. Ctrl-C ends the command with exit code 0.

    \b
    Examples:
      basilica train logs llama -f
      basilica train logs llama --rank 0 --rank 3 --tail 100
    """
    from contextlib import suppress

    from basilica.cli import show, terminal

    training = handle(name)
    merged = len(set(rank)) > 1 if rank else training.world.max > 1
    plain = terminal.is_plain(sys.stdout)
    screen = terminal.console(sys.stdout)
    with suppress(KeyboardInterrupt):
        for number, line in training.stream_logs(rank or None, tail=tail, follow=follow):
            if as_json:
                terminal.write_json({"rank": number, "line": line})
            elif raw or not sys.stdout.isatty():
                terminal.write_line(f"{number}| {line}" if merged else line)
            elif plain:
                terminal.write_line(f"{number}| {show.log_line(line)}" if merged else show.log_line(line))
            else:
                screen.print(show.rank_line(number, line, merged=merged, whole=True), soft_wrap=True)


def events(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run has ended.")] = False,
    limit: Annotated[
        int | None, typer.Option(help="List only this number of latest events.", min=1, max=10_000)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the events of a run, oldest first.

    If stdout is no terminal, each line has time, type, reason and message, separated by tabs.

    \b
    Examples:
      basilica train events llama
      basilica train events llama --follow
    """
    from contextlib import suppress

    from basilica.cli import show, terminal
    from basilica.client.effects import NoAnswer

    training = handle(name)
    happened = list(reversed(training.events(limit=limit)))
    if as_json and not follow:
        terminal.write_json({"events": [_event(e) for e in happened]})
        return
    if not follow and not terminal.is_plain(sys.stdout):
        terminal.show(show.events(happened))
        return
    with suppress(KeyboardInterrupt):
        _print_events(happened, as_json=as_json)
        seen = set(happened)
        for change in training.changes() if follow else ():
            if isinstance(change, NoAnswer):
                continue
            fresh = [e for e in reversed(training.events()) if e not in seen]
            _print_events(fresh, as_json=as_json)
            seen.update(fresh)


def _print_events(happened: "list[Event]", *, as_json: bool) -> None:
    from basilica.cli import show, terminal

    for event in happened:
        if as_json:
            terminal.write_json(_event(event))
        elif terminal.is_plain(sys.stdout):
            terminal.write_line(show.event_fields(event))
        else:
            terminal.show(show.event_line(event))


def _event(event: "Event") -> dict[str, Any]:
    from basilica.cli import show

    return {
        "type": event.kind,
        "reason": event.reason,
        "message": event.message,
        "count": event.count,
        "firstTimestamp": show.timestamp(event.first_at),
        "lastTimestamp": show.timestamp(event.last_at),
    }


def exits(name: Name, as_json: Json = False) -> None:
    """Show the exit of each rank, and the culprit with the evidence and its last log lines.

    Workers of torchrun agents that failed are shown as well, also while the run goes on.

    \b
    Example:
      basilica train exits llama
    """
    from basilica.cli import show, terminal

    view = handle(name).view
    if as_json:
        gang = view.raw.get("distributed") or {}
        facts = {"phase": view.phase, "settled": view.settled}
        ended = {"exits": gang.get("rankExits", []), "workerExits": gang.get("workerExits", [])}
        terminal.write_json(facts | ended | {"culprit": gang.get("culprit")})
        return
    if view.exits:
        terminal.show(show.exits(view.exits, None if view.culprit is None else view.culprit.rank))
        for line in show.raised(view.exits):
            terminal.show(line)
    else:
        terminal.notify("the run has not ended" if not view.is_terminal else "no rank's exit is known")
    if view.worker_exits:
        if view.exits:
            terminal.write_line("")
        terminal.show(show.exits(view.worker_exits, None))
        for line in show.exceptions(view.worker_exits):
            terminal.show(line)
    if not view.exits:
        return
    guilty = show.culprit(view)
    if guilty is not None:
        terminal.show(guilty)
    if not view.settled:
        terminal.notify("ranks are still being stopped; their exits are to come")


def goodput(name: Name, as_json: Json = False) -> None:
    """Show the time of a run by cause: how much of it trained, what the rest was lost to, and what incidents cost.

    Every second of every wanted rank has one cause. The time of a program that reports no steps is unattributed, so
    its goodput has two bounds: basilica.report(step=...) in the training loop makes them one.

    \b
    Examples:
      basilica train goodput llama
      basilica train goodput llama --json | jq .goodput.least
    """
    from basilica.cli import terminal
    from basilica.cli.show_goodput import page

    view = handle(name).view
    if as_json:
        gang = view.raw.get("distributed") or {}
        facts = {"phase": view.phase, "goodput": gang.get("goodput"), "notice": gang.get("notice")}
        terminal.write_json(facts | {"incidents": gang.get("incidents", [])})
    elif view.goodput is None:
        terminal.notify("this server keeps no account of a run's time")
    else:
        terminal.show(page(view, view.goodput, now()))


def checkpoints(name: Name, as_json: Json = False) -> None:
    """List the snapshots of a run that basilica.Progress keeps: steps, tiers, ranks, sizes and ages.

    A step can be resumed if every rank is there, in any mixture of tiers.

    \b
    Examples:
      basilica train checkpoints llama
      basilica train checkpoints llama --json
    """
    from basilica.cli import terminal
    from basilica.cli.show_checkpoints import table

    found = handle(name).checkpoints()
    if as_json:
        rows = [{**asdict(each), "sealed_at": _moment(each.sealed_at)} for each in found or ()]
        camel = [{("sealedAt" if key == "sealed_at" else key): value for key, value in row.items()} for row in rows]
        terminal.write_json({"known": found is not None, "checkpoints": camel})
    elif found is None:
        terminal.notify("this server cannot read the snapshots of a run: they are in the volumes of its ranks")
    elif found:
        terminal.show(table(found, now()))
    else:
        terminal.notify("no snapshot is kept: basilica.Progress takes them")


def _moment(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def bench(
    name: Name,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a plot of the sweep to this file: .svg, or .png, .pdf … with matplotlib.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the network bench of a run: its figures between two nodes, or its progress.

    Exits 0 in either case.

    \b
    Examples:
      basilica train bench llama
      basilica train bench llama --plot link.svg
    """
    from basilica.cli import terminal
    from basilica.cli.show_bench import bench as shown

    view = handle(name).view
    if as_json:
        gang = view.raw.get("distributed") or {}
        terminal.write_json(gang.get("bench") or {"mode": "off"})
    else:
        terminal.show(shown(view.bench))
    if plot is not None:
        _plot(view, plot)


def _plot(view: "RunView", path: Path) -> None:
    from basilica.cli.plot import draw
    from basilica.cli.terminal import notify
    from basilica.core.errors import BasilicaError

    found = None if view.bench is None else view.bench.result
    if found is None or not found.sweep:
        notify("there is no sweep to draw" if found else "there is no result to draw yet")
        return
    try:
        draw(view.name, found, path)
    except (OSError, ValueError) as error:
        raise BasilicaError(f"cannot draw into {path}: {error}") from error
