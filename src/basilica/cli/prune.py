"""`basilica prune`: remove ended runs with their logs."""

import json
from typing import Annotated

import typer

from basilica.cli.common import Json, StateDir, seconds


def prune(
    older_than: Annotated[str, typer.Option(help="Only runs that ended so long ago: 12h, 7d.")] = "7d",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Remove ended runs of the local user, with their logs and checkpoints.

    \b
    Example:
      basilica prune --older-than 12h
    """
    from basilica.cli.local_server import request

    age = seconds(older_than)
    answer = request(state_dir, "POST", "/prune", params={"older_than": age})
    deleted = answer["deleted"]
    if as_json:
        typer.echo(json.dumps(answer))
        return
    for name in deleted:
        typer.echo(f"removed {name}")
    removed = "1 run removed" if len(deleted) == 1 else f"{len(deleted)} runs removed"
    typer.echo(removed if deleted else f"no run ended more than {older_than} ago")
