"""Where a control plane of this machine keeps its things, and whether a process is still the one that was meant.

Standard library only: servers and clients both read it.
"""

import os
import sys
from pathlib import Path

from basilica.core import environment as env

STATE_FILE = "basilica.db"
LOCK_FILE = STATE_FILE + ".lock"  # an flock on it, and the pid of its owner in it
NOTE_FILE = "server.json"  # where the server listens, for clients on the same machine


def default_state_dir() -> Path:
    """`BASILICA_STATE_DIR`, else what XDG says."""
    explicit = os.environ.get(env.STATE_DIR)
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "basilica"


def start_of(pid: int) -> int | None:
    """When the process started, in ticks since boot: with the pid it is one process for ever.

    None: it has ended (a zombie has, too), or the system does not say.
    """
    if sys.platform != "linux":
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])
