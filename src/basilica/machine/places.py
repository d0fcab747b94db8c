"""The state directory of this machine's control plane, and the identity of its process.

Standard library only: servers and clients both import it.
"""

import os
import sys
from pathlib import Path

from basilica.core import environment as env

STATE_FILE = "basilica.db"
LOCK_FILE = STATE_FILE + ".lock"  # an flock on it, and the pid of its owner in it
NOTE_FILE = "server.json"  # the address of the server, for clients on the same machine


def default_state_dir() -> Path:
    """Return `BASILICA_STATE_DIR`, else the directory of the XDG rules."""
    explicit = os.environ.get(env.STATE_DIR)
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "basilica"


def start_of(pid: int) -> int | None:
    """Return the start of the process in ticks since boot, which identifies it together with its pid.

    None if it has ended (a zombie has, too), or where the system has no such time.
    """
    if sys.platform != "linux":
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])
