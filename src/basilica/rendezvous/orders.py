"""Orders and records in the run's keyspace, by which a remote control plane runs ranks. Pure.

    /basilica/ranks/<rank>               the order for the rank: which attempt to run, or to end
    /basilica/attempts/<rank>/<attempt>  the record of an attempt; to create it is to claim the attempt
    /basilica/results/<rank>             what the rank wrote to its result file, base64
    /basilica/reports/<rank>             the last that it reported
    /basilica/activity/<rank>            what its program does, and its answer to a notice (`progress.published`)

An attempt is claimed once: by the process that runs it, or by the control plane for nobody, so that one that is stopped
before it started never will. A value that is not understood counts as a missing key.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from basilica.core.seen import Ended
from basilica.rendezvous.names import ATTEMPTS, ORDERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Run this attempt, or end it within its grace. `leave`: then end the container too; nothing more is wanted."""

    attempt: int
    run: bool
    world: int = 0
    grace: float = 0.0
    leave: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """`pod` is the uid of the pod that has the attempt, empty where nobody has it."""

    pod: str
    node: str = ""
    claimed_at: float = 0.0
    started_at: float | None = None
    ended: Ended | None = None

    def dump(self) -> str:
        return json.dumps(asdict(self))


def order_key(rank: int) -> str:
    return f"{ORDERS}/{rank}"


def attempt_key(rank: int, attempt: int) -> str:
    return f"{ATTEMPTS}/{rank}/{attempt}"


def load_order(text: str) -> Order | None:
    found = _loaded(text, Order)
    return Order(**found) if found is not None and _are_numbers(found, "attempt") else None


def load_record(text: str) -> AttemptRecord | None:
    found = _loaded(text, AttemptRecord)
    if found is None or not isinstance(found.get("pod"), str):
        return None
    ended = found.get("ended")
    if ended is not None:
        ended = _load_ended(ended)
        if ended is None:
            return None
    return AttemptRecord(**{**found, "ended": ended})


def orders_in(values: Mapping[str, str]) -> dict[int, Order]:
    """Return the orders among the keys, by rank."""
    found: dict[int, Order] = {}
    for key, value in values.items():
        if key.startswith(f"{ORDERS}/"):
            rank, order = key.removeprefix(f"{ORDERS}/"), load_order(value)
            if rank.isdecimal() and order is not None:
                found[int(rank)] = order
    return found


def records_in(values: Mapping[str, str]) -> dict[tuple[int, int], AttemptRecord]:
    """Return the records among the keys, by rank and attempt."""
    found: dict[tuple[int, int], AttemptRecord] = {}
    for key, value in values.items():
        rank, _, attempt = key.removeprefix(f"{ATTEMPTS}/").partition("/")
        if key.startswith(f"{ATTEMPTS}/") and rank.isdecimal() and attempt.isdecimal():
            record = load_record(value)
            if record is not None:
                found[int(rank), int(attempt)] = record
    return found


def _load_ended(found: Any) -> Ended | None:
    known = _known(found, Ended)
    if known is None or not _are_numbers(known, "finished_at") or not isinstance(known.get("reason"), str):
        return None
    lines = known.get("log_tail", ())
    if not isinstance(lines, list | tuple):
        return None
    return Ended(**{"exit_code": None, **known, "log_tail": tuple(map(str, lines))})


def _loaded(text: str, kind: type[Any]) -> dict[str, Any] | None:
    try:
        return _known(json.loads(text), kind)
    except (ValueError, RecursionError):
        return None


def _known(found: Any, kind: type[Any]) -> dict[str, Any] | None:
    """Return the fields that this version knows; those of a newer one are dropped."""
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in found.items() if key in names} if isinstance(found, dict) else None


def _are_numbers(found: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(found.get(name), int | float) for name in names)
