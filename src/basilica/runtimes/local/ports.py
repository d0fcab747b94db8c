"""The ports of a run: picked once, by binding, and the same for its whole life."""

import json
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from basilica.machine import files

BYTES_MAX = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """`rendezvous` is 0 until the run has one."""

    master: int
    rendezvous: int = 0


def ports_of(path: Path) -> Ports:
    """Read the run's ports; the one that is free to choose is picked now."""
    try:
        return _parse(files.read(str(path), BYTES_MAX))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ):  # there are none yet, or a rank has put something else there
        pass
    with socket.socket() as held:
        held.bind(("", 0))
        return _write(path, Ports(master=held.getsockname()[1]))


def remember_rendezvous(path: Path, port: int) -> None:
    ports = ports_of(path)
    if ports.rendezvous != port:
        _write(path, replace(ports, rendezvous=port))


def _parse(data: bytes) -> Ports:
    found = json.loads(data)
    ports = Ports(master=int(found["master"]), rendezvous=int(found.get("rendezvous", 0)))
    if not (0 < ports.master < 1 << 16 and 0 <= ports.rendezvous < 1 << 16):
        raise ValueError(f"no ports: {ports}")
    return ports


def _write(path: Path, ports: Ports) -> Ports:
    files.write(str(path), json.dumps(asdict(ports)).encode())
    return ports
