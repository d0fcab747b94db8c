"""A control plane to be killed: `python -m tests.runtime_local.control_plane STATE_DIR MARK NAME SCRIPT RANKS`.

It launches the ranks, says `up` once all are running, and then waits for its end.
"""

import asyncio
import sys
from pathlib import Path

from tests.runtime_local.machine import Machine, sh


async def main(state_dir: str, mark: str, name: str, script: str, ranks: str) -> None:
    machine = Machine(Path(state_dir))
    machine.mark = mark
    async with machine.control_plane():
        run = machine.run(sh(script), name=name)
        await machine.launch(run, *range(int(ranks)))
        for rank in range(int(ranks)):
            await machine.until(run, lambda seen: seen.started_at is not None, rank=rank)
        print("up", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
