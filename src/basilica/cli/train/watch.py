"""`basilica train watch`: a run while it changes."""

import asyncio
import sys
from typing import Annotated

import typer

from basilica.cli.common import Json
from basilica.cli.train.common import Name, handle


def watch(
    name: Name,
    logs: Annotated[bool, typer.Option("--logs", help="Also show the last log lines of ranks.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a run until its end: its state, ranks and events, live.

    q and Ctrl-C end the command and do not affect the run. If stdout is no terminal, prints one line for each change;
    with --json, one answer of the server for each change.

    \b
    Examples:
      basilica train watch llama
      basilica train watch llama --logs
    """
    from basilica.cli import show, terminal
    from basilica.cli.train import live

    training = handle(name)

    async def follow() -> None:
        screen = None
        display: live.Display
        if as_json:
            display = live.JsonStates()
        elif terminal.is_plain(sys.stdout):
            display = live.Lines()
        else:
            display = screen = live.Screen(keys="q leaves; the run goes on", wants_lines=logs)
        with (
            live.interruptions(None if screen is None else screen.resized) as queue,
            live.displayed(display),
        ):
            end = asyncio.create_task(live.follow(training, display))
            try:
                while True:
                    what = await live.end_or_interruption(end, queue, None)
                    signals = (live.Interruption.INTERRUPT, live.Interruption.TERMINATE)
                    if not isinstance(what, str) or what in (*signals, "q", "Q"):
                        return
            finally:
                end.cancel()
                await asyncio.gather(end, return_exceptions=True)

    asyncio.run(follow())
    view = training.view
    if view.is_terminal and not as_json:
        shown = terminal.is_plain(sys.stdout)  # the last printed line has the end of the run
        terminal.show(show.blame(view) if shown else show.outcome(view))
