"""`basilica local`: the background server that scripts and notebooks use when no other is named."""

import json
from typing import Annotated, Any

import typer

from basilica.cli.common import Json, StateDir, seconds

app = typer.Typer(
    help="Start, stop and inspect the background server that scripts use by default.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("start")
def start(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Start the server in the background, unless it runs already, and print its address.

    Scripts start it by themselves. It stops when no run is live and no request came for 15 minutes
    (BASILICA_IDLE_EXIT: another number of seconds, 0 for never).

    \b
    Example:
      basilica local start
    """
    from basilica.client import embedded

    found = embedded.find(state_dir)
    embedded.locate(state_dir)
    running = embedded.status(state_dir)
    if running is None:  # the server stopped again between two lines
        raise embedded.CannotStart(_place(state_dir), "it started and has stopped again")
    started = found is None or found.pid != running.pid
    if as_json:
        typer.echo(json.dumps(_facts(running) | {"started": started}))
        return
    typer.echo(f"Basilica listens on {running.url} (pid {running.pid}{'' if started else ', as before'})")
    typer.echo(f"API key: {running.key_file}")
    typer.echo(f"Log: {running.log_file or 'where it was started'}")


@app.command("stop")
def stop(
    cancel_runs: Annotated[bool, typer.Option("--cancel-runs", help="Cancel live runs before the stop.")] = False,
    timeout: Annotated[str, typer.Option(help="Longest wait for the end of the server: 30s, 2m.")] = "30s",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Stop the server; live runs continue, and the next server adopts them.

    Exits 0 if no server runs.

    \b
    Examples:
      basilica local stop
      basilica local stop --cancel-runs --timeout 2m
    """
    from basilica.client import embedded

    within = seconds(timeout)
    before = embedded.status(state_dir)
    stopped = embedded.shutdown(state_dir, cancel_runs=cancel_runs, timeout=within)
    live = before.live_runs if before is not None and stopped else 0
    going_on = 0 if cancel_runs else live
    if as_json:
        cancelled = live if cancel_runs else 0
        typer.echo(json.dumps({"stopped": stopped, "runsGoingOn": going_on, "runsCancelled": cancelled}))
        return
    if not stopped:
        typer.echo(f"no server runs on {_place(state_dir)}")
        return
    typer.echo("stopped" if before is None else f"stopped (pid {before.pid})")
    if cancel_runs and live:
        typer.echo(f"{_runs(live)} cancelled")
    elif going_on:
        typer.echo(f"{_runs(going_on)} still live, without a server: the next one takes them up")


@app.command("status")
def status(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show whether the server runs, its address, and its number of live runs. Exits 1 if none runs.

    \b
    Example:
      basilica local status || basilica local start
    """
    from basilica.client import embedded

    running = embedded.status(state_dir)
    if as_json:
        facts = {"running": False, "stateDir": _place(state_dir)} if running is None else _facts(running)
        typer.echo(json.dumps(facts))
    elif running is None:
        typer.echo(f"no server runs on {_place(state_dir)}")
    else:
        live = "it does not answer" if running.live_runs is None else f"{_runs(running.live_runs)} live"
        typer.echo(f"Basilica listens on {running.url} (pid {running.pid}); {live}")
        typer.echo(f"State: {running.state_dir}")
        typer.echo(f"API key: {running.key_file}")
        typer.echo(f"Log: {running.log_file or 'where it was started'}")
    if running is None:
        raise typer.Exit(1)


def _facts(running: Any) -> dict[str, Any]:
    return {
        "running": True,
        "url": running.url,
        "pid": running.pid,
        "stateDir": str(running.state_dir),
        "keyFile": str(running.key_file),
        "logFile": None if running.log_file is None else str(running.log_file),
        "startedAt": running.started_at,
        "liveRuns": running.live_runs,
    }


def _place(state_dir: Any) -> str:
    from basilica.machine.places import default_state_dir

    return str(state_dir or default_state_dir())


def _runs(count: int | None) -> str:
    return "1 run" if count == 1 else f"{count} runs"
