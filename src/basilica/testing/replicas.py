"""What replicas run in the conformance suite of executors. Standard library only: it may run in other people's images.

They meet the test in a directory that both see.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

GIVE_UP_SECONDS = 120.0


def rank() -> int:
    return int(os.environ["REPLICA_RANK"])


def tell(**arguments: Any) -> dict[str, Any]:
    """Who this replica is, and what reached it."""
    names = ("REPLICA_RANK", "WORLD_SIZE", "ENTRYPOINT_ARGS", "STEPS", "NAME", "FLAG", "THINGS")
    return {
        "rank": rank(),
        "arguments": arguments,
        "environment": {name: os.environ[name] for name in names if name in os.environ},
    }


def tell_variable(variable: str) -> str | None:
    return os.environ.get(variable)


def tell_kind(thing: object) -> str:
    return type(thing).__name__


def wait(directory: str) -> str:
    """Say that it is there, with its pid, and go on once the file `gate` is."""
    here = Path(directory)
    print(f"rank {rank()} waits", flush=True)
    draft = here / f"draft-{rank()}"
    draft.write_text(str(os.getpid()))
    draft.rename(here / f"pid-{rank()}")
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not (here / "gate").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody opened the gate")
        time.sleep(0.01)
    print(f"rank {rank()} goes on", flush=True)
    return f"rank {rank()} was here"


def write_lines(lines: int) -> None:
    for number in range(lines):
        print(f"line {number}")


def leave_or_wait(culprit: int, code: int, directory: str) -> str:
    """One rank exits with a code of its own once the others wait."""
    if rank() != culprit:
        return wait(directory)
    size = int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while len(list(Path(directory).glob("pid-*"))) < size - 1:
        if time.monotonic() > deadline:
            raise TimeoutError("the others did not come")
        time.sleep(0.01)
    print(f"rank {rank()} leaves with {code}", flush=True)
    sys.exit(code)


def return_or_leave(culprit: int, code: int, directory: str) -> str:
    """One rank waits at the gate and exits with a code of its own; the others return at once."""
    if rank() == culprit:
        wait(directory)
        sys.exit(code)
    return f"rank {rank()} is done"


def break_down(culprit: int) -> int:
    """One rank fails with an exception; the others return."""
    if rank() == culprit:
        raise ValueError("the loss is not a number")
    return rank()


def be_killed(culprit: int, number: int = signal.SIGKILL) -> int:
    """One rank is killed; the others return."""
    print(f"rank {rank()} lives", flush=True)
    if rank() == culprit:
        os.kill(os.getpid(), number)
    return rank()
