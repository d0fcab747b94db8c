"""The ports of a run: picked once, by binding, and the same for its whole life."""

import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """`rendezvous` is 0 until the run has one."""

    master: int
    rendezvous: int = 0


def ports_of(path: Path) -> Ports:
    """Read the run's ports; the one that is free to choose is picked now."""
    try:
        return Ports(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        pass
    with socket.socket() as held:
        held.bind(("", 0))
        return _write(path, Ports(master=held.getsockname()[1]))


def remember_rendezvous(path: Path, port: int) -> None:
    ports = ports_of(path)
    if ports.rendezvous != port:
        _write(path, replace(ports, rendezvous=port))


def _write(path: Path, ports: Ports) -> Ports:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(ports)))
    os.replace(draft, path)
    return ports
