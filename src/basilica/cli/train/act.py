"""The commands that change or end runs: `scale`, `cancel`, `down`, `exec`, `prune`."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from basilica.cli.common import Json, seconds
from basilica.cli.train import options as given
from basilica.cli.train.common import Name, Names, client, handle
from basilica.cli.train.wait import Goal, finish, until

if TYPE_CHECKING:
    from basilica.client.training import DistributedTraining

WAIT_SECONDS = 600.0


def scale(
    name: Name,
    target: Annotated[int, typer.Option(help="Number of ranks that the run is to have.", show_default=False)],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the target is reached and surplus ranks have ended.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="Longest wait: 90s, 15m.")] = "10m",
    as_json: Json = False,
) -> None:
    """Set the target number of ranks of a run, within its min and max.

    With --wait, exits with 124 after the timeout, and as the run did if it ended meanwhile.

    \b
    Example:
      basilica train scale llama --target 6 --wait
    """
    from basilica.cli import terminal

    limit = seconds(timeout)
    training = handle(name)
    world = training.scale(target)
    if wait:
        until(training, Goal.TARGET, limit, as_json=as_json)
        finish(training.view, as_json=as_json)
    elif as_json:
        terminal.write_json(training.view.raw)
    else:
        terminal.write_line(f"{training.friendly_name}: {world.ready} of {world.target} ranks up")


def cancel(
    names: Names,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all ranks have ended.")] = False,
    as_json: Json = False,
) -> None:
    """Cancel runs and keep their records; a run that has ended does not change.

    \b
    Examples:
      basilica train cancel llama
      basilica train cancel llama mistral --wait
    """
    from basilica.cli import show, terminal

    cancelled: list[DistributedTraining] = []

    def end(training: "DistributedTraining") -> None:
        training.cancel()
        cancelled.append(training)

    failed = _each(names, end)
    for training in cancelled:
        if wait:
            _until_settled(training)
        if not as_json:
            terminal.write_line(f"{show.clean(training.friendly_name)} {show.clean(training.phase)}")
    if as_json:
        terminal.write_json([training.view.raw for training in cancelled])
    if failed:
        raise typer.Exit(1)


def _until_settled(training: "DistributedTraining") -> None:
    from basilica.cli import show, terminal

    with terminal.busy(lambda: f"stopping {show.clean(training.friendly_name)}"):
        for _ in training.changes():
            pass


def down(
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete runs with their logs and checkpoints; live runs are stopped first.

    At a terminal, asks for confirmation if a run is live.

    \b
    Examples:
      basilica train down llama
      basilica train down llama mistral --yes
    """
    from basilica.cli import show, terminal

    deleted: list[str] = []

    def remove(training: "DistributedTraining") -> None:
        shown = show.clean(training.friendly_name)
        if not (yes or training.is_terminal) and terminal.can_ask() and not as_json:
            question = f"{shown} is {show.clean(training.phase)}. Stop and delete it?"
            if not typer.confirm(question, err=True):
                terminal.notify(f"{shown} is kept")
                return
        with terminal.busy(lambda: f"deleting {shown}"):
            training.delete()
        deleted.append(training.name)
        if not as_json:
            terminal.write_line(f"deleted {shown}")

    failed = _each(names, remove)
    if as_json:
        terminal.write_json({"deleted": deleted})
    if failed:
        raise typer.Exit(1)


def exec_(
    context: typer.Context,
    name: Name,
    rank: Annotated[int, typer.Option(help="Rank beside which the command runs.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Run a command beside a rank, in its environment and working directory.

    Exits with the exit code of the command. The command is killed when this one ends.

    \b
    Examples:
      basilica train exec llama --rank 2 -- nvidia-smi
      basilica train exec llama -- sh -c 'ls -l $BASILICA_RESULT_FILE'
    """
    from basilica.cli import terminal

    command = context.meta[given.REST]
    if not command:
        raise typer.BadParameter("write the command after '--'", param_hint="COMMAND")
    for piece in handle(name).execute(command, rank):
        if isinstance(piece, int):
            if as_json:
                terminal.write_json({"exitCode": piece})
            raise typer.Exit(piece if 0 <= piece <= 255 else 1)
        stream, text = piece
        if as_json:
            terminal.write_json({"stream": stream, "text": text})
        elif text:
            terminal.write_text(text, sys.stderr if stream == "stderr" else sys.stdout)


def prune(
    older_than: Annotated[
        str, typer.Option(help="Delete only runs that ended at least this long ago: 12h, 7d.")
    ] = "7d",
    as_json: Json = False,
) -> None:
    """Delete ended runs with their logs and checkpoints.

    \b
    Example:
      basilica train prune --older-than 12h
    """
    from basilica.cli import terminal

    age = seconds(older_than)
    with terminal.busy(lambda: "deleting runs"):
        deleted = client().prune(age)
    pruned(deleted, older_than, as_json=as_json)


def pruned(deleted: Sequence[str], older_than: str, *, as_json: bool) -> None:
    from basilica.cli import terminal

    if as_json:
        terminal.write_json({"deleted": list(deleted)})
        return
    for name in deleted:
        terminal.write_line(f"removed {name}")
    removed = "1 run removed" if len(deleted) == 1 else f"{len(deleted)} runs removed"
    terminal.write_line(removed if deleted else f"no run ended more than {older_than} ago")


def _each(names: Sequence[str], act: "Callable[[DistributedTraining], None]") -> bool:
    """Act on every run in turn; one that is not found or refuses does not stop the loop. Return whether one failed."""
    from basilica.cli.terminal import notify
    from basilica.core.errors import BasilicaError

    failed = False
    for name in names:
        try:
            act(handle(name))
        except BasilicaError as error:
            failed = True
            notify(f"basilica: {error}")
    return failed
