"""The wait for a run: `basilica train wait`, and the second half of `up` and `rerun`."""

import asyncio
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from basilica.cli.common import Json, seconds
from basilica.cli.train.common import Name, handle, progress_of, word

if TYPE_CHECKING:
    from basilica.cli.train import live
    from basilica.client.training import DistributedTraining
    from basilica.client.views import RunView

FOR_EVER = 10 * 365 * 86400.0
UP_SECONDS = 600.0


class Goal(StrEnum):
    """The goal of a wait."""

    MIN = "min"
    TARGET = "target"
    COMPLETE = "complete"
    BENCH = "bench"


def wait(
    name: Name,
    goal: Annotated[Goal, typer.Option("--for", help="Condition to wait for.")] = Goal.COMPLETE,
    timeout: Annotated[
        str | None, typer.Option(help="Longest wait: 90s, 15m; 0 checks once.", show_default="no limit")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until min or target ranks are up, or until a run or its bench has ended.

    Exits 0 when the condition holds, with the culprit's exit code if the run failed, 130 if it was cancelled, and 124
    after the timeout.

    \b
    Examples:
      basilica train wait llama --for target --timeout 5m
      basilica train wait llama && echo done
    """
    from basilica.cli import show_bench, terminal

    limit = FOR_EVER if timeout is None else seconds(timeout)
    training = handle(name)
    until(training, goal, limit, as_json=as_json)
    if goal is Goal.BENCH and not as_json:
        terminal.show(show_bench.bench(training.bench_status))
        return
    finish(training.view, as_json=as_json, bench=goal is Goal.BENCH)


def until(training: "DistributedTraining", goal: Goal, limit: float, *, as_json: bool) -> None:
    """Return once the run has reached the goal or has ended; exit with 124 when the time is up."""
    from basilica.cli.terminal import busy, notify, write_json
    from basilica.cli.train.outcome import TIMED_OUT
    from basilica.core.errors import BelowMinimumWorld

    wait_for = {
        Goal.MIN: training.wait_until_min_world,
        Goal.TARGET: training.wait_until_target_world,
        Goal.COMPLETE: training.join,
        Goal.BENCH: training.wait_until_bench_complete,
    }[goal]
    try:
        with busy(lambda: progress_of(training)):
            wait_for(limit)
    except (BelowMinimumWorld, TimeoutError) as error:
        if training.is_terminal and goal is not Goal.BENCH:
            return
        notify(f"basilica: {error}")
        if as_json:
            write_json(training.view.raw)
        raise typer.Exit(TIMED_OUT) from None


def finish(view: "RunView", *, as_json: bool, bench: bool = False) -> None:
    """Show the state of the run, and exit with its code if it is over."""
    from basilica.cli import show, terminal
    from basilica.cli.train.outcome import exit_code

    if as_json:
        terminal.write_json(view.raw)
    else:
        terminal.show(show.outcome(view) if view.is_terminal else show.standing(view))
    if view.is_terminal and not bench:
        raise typer.Exit(exit_code(view))


# ---- after `up` and `rerun` --------------------------------------------------------------------------------------


def go_on(
    training: "DistributedTraining",
    *,
    wait: bool,
    detach: bool,
    logs: bool,
    remove: bool,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Wait as the options request, and show the next commands."""
    from basilica.cli import show, terminal

    if wait:
        _to_the_end(training, logs=logs, remove=remove, timeout=timeout, as_json=as_json)
    if not detach:
        try:
            until(training, Goal.MIN, UP_SECONDS if timeout is None else timeout, as_json=as_json)
        except KeyboardInterrupt:
            _detached(training, as_json=as_json)
    view = training.view
    if as_json or view.is_terminal:
        finish(view, as_json=as_json)
    else:
        terminal.show(show.started(view, word(view)))


def _to_the_end(
    training: "DistributedTraining", *, logs: bool, remove: bool, timeout: float | None, as_json: bool
) -> NoReturn:
    from basilica.cli import show, terminal
    from basilica.cli.train import live
    from basilica.cli.train.outcome import TIMED_OUT, exit_code

    plain = as_json or terminal.is_plain(sys.stdout)
    try:
        how = asyncio.run(_follow(training, _display(training, plain=plain, logs=logs, as_json=as_json), timeout))
    except KeyboardInterrupt:  # before our handler was installed
        how = live.Interruption.INTERRUPT
    view = training.view
    if how in (live.Interruption.TERMINATE, live.Interruption.INTERRUPT):
        _detached(training, as_json=as_json)
    over = view.is_terminal
    if as_json:
        terminal.write_json(view.raw)
    elif over:
        shown = plain and not logs  # the last printed line has the end of the run
        terminal.show(show.blame(view) if shown else show.outcome(view), sys.stderr if plain and logs else sys.stdout)
    if not over:
        terminal.notify(f"basilica: after {timeout:g} s it is {show.change(view)}; it goes on")
        raise typer.Exit(TIMED_OUT)
    if remove:
        with terminal.busy(lambda: f"deleting {show.clean(view.name)}"):
            training.delete()
    raise typer.Exit(exit_code(view))


def _display(training: "DistributedTraining", *, plain: bool, logs: bool, as_json: bool) -> "live.Display":
    from basilica.cli import show, terminal
    from basilica.cli.train import live

    if not plain:
        return live.Screen(keys="Ctrl-C: detach or cancel", wants_lines=logs)
    if not as_json:
        terminal.notify(f"{show.clean(training.view.name)} is {show.clean(training.phase)}")
    if logs:
        return live.Logs(as_json=as_json, prefix=training.world.max > 1)
    return live.Silent() if as_json else live.Lines()


async def _follow(
    training: "DistributedTraining", display: "live.Display", timeout: float | None
) -> "live.Interruption | None":
    """Follow the run. None: it has ended. An interruption: the command exits, and the run goes on."""
    from basilica.cli import terminal
    from basilica.cli.train import live

    deadline = None if timeout is None else time.monotonic() + timeout
    resized = display.resized if isinstance(display, live.Screen) else None
    asking = resized is not None and terminal.can_ask()
    cancelled = False
    with live.interruptions(resized) as queue, live.displayed(display):
        end = asyncio.create_task(live.follow(training, display))
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                what = await live.end_or_interruption(end, queue, left)
                if what == live.Interruption.INTERRUPT and asking and not cancelled:
                    what = await _ask(end, display, queue)
                elif what == live.Interruption.INTERRUPT:
                    what = live.Interruption.TERMINATE if cancelled else live.Interruption.CANCEL
                match what:
                    case live.Interruption.CANCEL:
                        cancelled = True
                        await training.cancel_async()
                    case live.Interruption():
                        return what
                    case str():  # a key without a function
                        pass
                    case _:
                        return None
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)


async def _ask(
    end: "asyncio.Task[RunView]", display: "live.Display", queue: "asyncio.Queue[str]"
) -> "live.Interruption | RunView | str":
    """Ask the user at the terminal what to do with the interrupted run."""
    from basilica.cli import terminal
    from basilica.cli.train import live

    display.pause()
    terminal.notify("[d]etach or [c]ancel the run? Any other key watches on (Ctrl-C again: detach)")
    match await live.end_or_interruption(end, queue, None):
        case "d" | "D" | live.Interruption.INTERRUPT | live.Interruption.TERMINATE:
            return live.Interruption.TERMINATE
        case "c" | "C":
            display.resume()
            return live.Interruption.CANCEL
        case other:
            display.resume()
            return other


def _detached(training: "DistributedTraining", *, as_json: bool) -> NoReturn:
    from basilica.cli import show, terminal
    from basilica.cli.train.outcome import DETACHED

    view = training.view
    terminal.notify(f"detached; {show.clean(view.name)} goes on: basilica train watch {show.clean(word(view))}")
    if as_json:
        terminal.write_json(view.raw)
    raise typer.Exit(DETACHED)
