"""What replicas run in the tests of our own executors, besides those of the contract."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from basilica.diloco import on_sigterm
from basilica.testing.replicas import wait


def where() -> dict[str, Any]:
    return {"directory": os.getcwd(), "marker": os.environ.get("MARKER"), "python": sys.executable}


def length(text: str, numbers: list[float]) -> int:
    return len(text) + len(numbers)


def fail_in_turn(directory: str) -> None:
    """Each rank fails once the one after it has; the last fails first."""
    rank, size = int(os.environ["REPLICA_RANK"]), int(os.environ["WORLD_SIZE"])
    after = Path(directory) / f"failed-{rank + 1}"
    while rank + 1 < size and not after.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    (Path(directory) / f"failed-{rank}").touch()
    # The rank before must not be seen to end first: it ends well after this one has gone.
    sys.exit(10 + rank)


def stubborn(directory: str) -> None:
    """Ignores SIGTERM, and so does a child of it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    (Path(directory) / "child").write_text(str(child.pid))
    wait(directory)


def checkpointing(directory: str) -> None:
    @on_sigterm
    def save() -> None:
        (Path(directory) / "checkpoint").write_text("saved")

    wait(directory)


def finishing(directory: str) -> str:
    """Asked to end, it finishes by itself."""
    asked = []

    @on_sigterm
    def finish() -> bool:
        asked.append(True)
        return True

    (Path(directory) / "pid-0").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.01)
    return "finished"


def put_fifos() -> None:
    """FIFOs in the place of all files of this replica, and of two of its gang."""
    run, rank = os.path.dirname(os.environ["BASILICA_CHECKPOINT_DIR"]), os.environ["RANK"]
    mine = [f"rank-{rank}/0.log", f"rank-{rank}/0.record", f"rank-{rank}/0.error", f"results/{rank}.json"]
    for path in [*mine, *(["../../news", "../../wake"] if rank == "0" else [])]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{run}/{path}")
        os.mkfifo(f"{run}/{path}")
    os._exit(int(rank))
