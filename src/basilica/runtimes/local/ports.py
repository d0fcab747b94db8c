"""The ports of a run: picked once, by binding, and the same for its whole life."""

import json
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from basilica.machine import files

BYTES_MAX = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of a run. `rendezvous` is 0 until the run has one. `user` and `name` are the run's: they identify it
    should its record be lost."""

    master: int
    rendezvous: int = 0
    user: str = ""
    name: str = ""


def ports_of(path: Path) -> Ports:
    """Return the run's ports; if none are stored, pick and store the master port."""
    try:
        return _parse(files.read(str(path), BYTES_MAX))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ):  # there are none yet, or a rank has replaced the file
        pass
    with socket.socket() as held:
        held.bind(("", 0))
        return _write(path, Ports(master=held.getsockname()[1]))


def remember_rendezvous(path: Path, port: int, *, user: str, name: str) -> None:
    ports = ports_of(path)
    known = replace(ports, rendezvous=port, user=user, name=name)
    if known != ports:
        _write(path, known)


def _parse(data: bytes) -> Ports:
    found = json.loads(data)
    ports = Ports(master=int(found["master"]), rendezvous=int(found.get("rendezvous", 0)))
    if not (0 < ports.master < 1 << 16 and 0 <= ports.rendezvous < 1 << 16):
        raise ValueError(f"no ports: {ports}")
    return ports


def _write(path: Path, ports: Ports) -> Ports:
    files.write(str(path), json.dumps(asdict(ports)).encode())
    return ports
