"""The ports of a run: picked once, by binding, and the same for its whole life."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from basilica.runtimes.local.environment import LOOPBACK, Ports


def ports_of(path: Path) -> Ports:
    """Read the run's ports, or pick them now."""
    try:
        return Ports(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        ports = _pick()
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"master": ports.master, "rendezvous": ports.rendezvous}))
    os.replace(draft, path)
    return ports


def _pick() -> Ports:
    with ExitStack() as held:  # both at a time, or they might be the same
        sockets = [held.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        master, rendezvous = (each.getsockname()[1] for each in sockets)
    return Ports(master=master, rendezvous=rendezvous)
