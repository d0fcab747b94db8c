"""`basilica prune`: the same as `basilica train prune`, and for the server of a state directory."""

from typing import Annotated

import typer

from basilica.cli.common import Json, StateDir, seconds


def prune(
    context: typer.Context,
    *,
    older_than: Annotated[
        str, typer.Option(help="Delete only runs that ended at least this long ago: 12h, 7d.")
    ] = "7d",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Delete ended runs with their logs and checkpoints.

    With --state-dir, the runs of the server of that directory.

    \b
    Example:
      basilica prune --older-than 12h
    """
    from basilica.cli.train import act

    source = context.get_parameter_source("state_dir")
    if source is None or source.name != "COMMANDLINE":
        act.prune(older_than, as_json)
        return
    from basilica.cli.local_server import request

    answer = request(state_dir, "POST", "/prune", params={"older_than": seconds(older_than)})
    act.pruned(answer["deleted"], older_than, as_json=as_json)
