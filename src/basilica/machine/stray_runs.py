"""Stray runs: runs without a record in the store, of which a directory or marked processes are left."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from basilica.core import environment as env
from basilica.core.damage import Trouble
from basilica.machine.state_dir import REPAIR
from basilica.machine.strays import by_variable

_HOME = env.CHECKPOINT_DIR.encode()
_BELOW = "/checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayRun:
    """One stray run. `pids` are processes that were started as its ranks, or by them."""

    instance: str
    has_directory: bool
    pids: tuple[int, ...]


def find_stray_runs(state_dir: Path, known: Collection[str]) -> list[StrayRun]:
    """Return the stray runs. Reads all processes of the machine: for starts and for requests, not for every turn."""
    runs = state_dir / "runs"
    marked = by_variable(_HOME, os.fsencode(f"{runs}/"))
    processes = {rest.removesuffix(_BELOW): tuple(pids) for rest, pids in marked.items() if rest.endswith(_BELOW)}
    try:
        directories = {entry.name for entry in os.scandir(runs) if entry.is_dir(follow_symlinks=False)}
    except FileNotFoundError:
        directories = set()
    return [
        StrayRun(instance=name, has_directory=name in directories, pids=processes.get(name, ()))
        for name in sorted({*directories, *processes} - set(known))
    ]


def trouble_of(strays: Collection[StrayRun]) -> Trouble:
    """Return the trouble with the number of runs, not their names: everybody sees the health of a server."""
    alive = sum(bool(stray.pids) for stray in strays)
    message = f"{len(strays)} runs have left something here and there is no record of them; of {alive}, ranks still run"
    return Trouble(kind="ForgottenRuns", message=message, remedy=REPAIR)


def trouble_of_loss(expected: int, found: int) -> Trouble:
    message = (
        f"the state file has lost what was written last: it was at version {expected} and came back at {found}; "
        "runs, results of turns or keys may be missing"
    )
    return Trouble(kind="StateLost", message=message, remedy=REPAIR)


def trouble_of_damage(count: int) -> Trouble:
    message = f"the stored record of {count} {'run' if count == 1 else 'runs'} cannot be read"
    return Trouble(kind="DamagedRuns", message=message, remedy=f"delete them, or {REPAIR}")
