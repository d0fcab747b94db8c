"""Shared parts of the commands of `basilica train`."""

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from basilica.core.errors import DeploymentNotFound

if TYPE_CHECKING:
    from basilica.client.api import BasilicaClient
    from basilica.client.training import DistributedTraining
    from basilica.client.views import RunView

PATIENCE = 10.0  # people at a terminal give up sooner than programs; waits have their own time


def known_names(incomplete: str) -> list[str]:
    """Return names of runs for the shell's completion; it starts no server, and a failure is silent."""
    from basilica.client import embedded
    from basilica.client.api import BasilicaClient
    from basilica.core.errors import BasilicaError

    try:
        client = BasilicaClient()
        if client.is_embedded and embedded.find() is None:
            return []
        found = [view.name for view in client.list() if view.name.startswith(incomplete)]
        return list(dict.fromkeys(found))
    except BasilicaError:
        return []


def _checked(name: str) -> str:
    """Refuse a name that would be another path than that of a run."""
    if name in ("", ".", ".."):
        raise DeploymentNotFound(name)
    return name


def _all_checked(given: list[str]) -> list[str]:
    return [_checked(name) for name in given]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the run (the newest with that name), or its instance name.",
        callback=_checked,
        autocompletion=known_names,
        show_default=False,
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="Names of the runs (the newest of each name), or instance names.",
        callback=_all_checked,
        autocompletion=known_names,
        show_default=False,
    ),
]


def client() -> "BasilicaClient":
    from basilica.client import flows
    from basilica.client.api import BasilicaClient

    flows.PATIENCE = PATIENCE
    return BasilicaClient()


def handle(name: str) -> "DistributedTraining":
    """Look up the run of that name; if a server has to be started first, show that."""
    from basilica.cli.terminal import busy

    with busy(lambda: "asking the server"):
        return client().training(name)


def now() -> datetime:
    return datetime.now(UTC)


def word(view: "RunView") -> str:
    """Return the name of a run as an argument of our commands."""
    return shlex.quote(view.name)


def progress_of(training: "DistributedTraining") -> str:
    from basilica.cli import show

    view = training.view
    return f"{show.clean(view.name)} {show.clean(view.phase)}: {show.clean(show.message_of(view))}"
