"""The bucket is the run: what it holds beside the rounds, so that the prefix alone is enough to go on from.

    <run>/run.json                              what runs: entrypoint, arguments, world, settings; created once
    <run>/frozen<part>.json                     checksums of the parameters that nobody trains, where there are any
    <run>/members/<rank>-<incarnation>.json     each start of a replica
    <run>/exits/<rank>-<incarnation>.json       how it ended, if it could tell
    <run>/states/<name>/<round>/<i>-of-<n>      agreed parameters, outer momentum and buffers after so many rounds
    <run>/log/<name>/<round>.json               who was counted, the sample cursor, what it cost, when

`name` is that of an all-reduce, one for each fragment. A state is written in equal pieces by those who were counted;
each holds the fingerprint of the whole. A state that is not complete, or does not fit it, does not count.
"""

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from basilica.diloco.documents import ROUND_DIGITS, read_record
from basilica.diloco.drive import Driver, Traffic
from basilica.diloco.effects import Found, Range
from basilica.diloco.errors import RoundError
from basilica.diloco.fragments import Checksum
from basilica.diloco.outer import Array, fingerprint
from basilica.diloco.records import Record, Torn, seal
from basilica.diloco.stores.port import ObjectStore

FORMAT = 1
NEEDED = {
    "members": ("rank", "incarnation", "host", "at"),
    "exits": ("rank", "incarnation", "outcome"),
    "log": ("name", "round", "weights", "samples", "bytes_up", "bytes_down", "seconds", "waited", "at"),
}
"""The required fields of each kind of small document."""
STATES_KEPT = 2
_PIECE = re.compile(r"(\d+)/\d+-of-(\d+)")
"""The name of a piece below its fragment: the round and how many there are."""
LARGEST_PIECE = 1 << 30
"""Bytes of a state in one object: a request for more is refused by some stores, and is lost as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The facts for starting replicas of the run again, by any executor."""

    entrypoint: str | None
    arguments: Mapping[str, Any]
    world_size: int
    quorum: int | None
    settings: Mapping[str, Any]
    created_at: float
    format: int = FORMAT

    @classmethod
    def of(cls, told: Mapping[str, Any], where: str) -> "RunRecord":
        """As it was recorded, by this version or one that knows more of the same format."""
        if told.get("format", FORMAT) != FORMAT:
            raise RoundError(where, f"has the format {told['format']}, and this version of basilica knows {FORMAT}")
        _check_fields(told, ("arguments", "created_at", "entrypoint", "quorum", "settings", "world_size"), where)
        return cls(**{known.name: told[known.name] for known in fields(cls) if known.name in told})

    @property
    def importable(self) -> bool:
        """Return whether the entrypoint can be started by its name; a shipped function cannot."""
        return bool(self.entrypoint and ":" in self.entrypoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The agreed state after `round` rounds of one fragment. `velocity` is None before the first."""

    name: str
    round: int
    chain: str
    expected: tuple[int, ...]
    samples: float
    parameters: Sequence[Array]
    velocity: Sequence[Array] | None
    digest: str
    buffers: Sequence[Array] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One finished round. Bytes, seconds and requests are those of the replica that wrote it."""

    name: str
    round: int
    attempt: int
    weights: Mapping[str, float]
    samples: float
    chain: str
    digest: str
    array_bytes: int
    bytes_up: int
    bytes_down: int
    requests: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    waited: float = 0.0
    at: float = 0.0
    troubles: Sequence[str] = ()


class Bucket:
    """One run in an object store."""

    def __init__(self, store: ObjectStore, run_id: str = "run") -> None:
        self.store, self.run_id = store, run_id
        self._driver = Driver(store)

    # The run and its members.

    def begin(self, record: RunRecord) -> RunRecord:
        """Record the run, unless it is recorded already; what stands."""
        self._create_json("run.json", asdict(record))
        return self.record() or record

    def record(self) -> RunRecord | None:
        told = self._read_json("run.json")
        return None if told is None else RunRecord.of(told, f"{self.run_id}/run.json")

    def join(self, rank: int, **more: Any) -> int:
        """Record a start of this rank; how many there were before."""
        while True:
            before = self.store.list(f"{self.run_id}/members/{rank:05d}-")
            incarnation = 1 + max((_last_number(found.key) for found in before), default=-1)
            told = {"rank": rank, "incarnation": incarnation, "at": time.time(), "host": socket.gethostname()}
            told |= {"pid": os.getpid(), "token": secrets.token_hex(8), **more}
            key = f"members/{rank:05d}-{incarnation:05d}.json"
            # A store that repeats a request whose answer was lost finds our own document there.
            if self._create_json(key, told) or (self._read_json(key) or {}).get("token") == told["token"]:
                return incarnation

    def leave(self, rank: int, incarnation: int, **outcome: Any) -> None:
        """Record how that start ended."""
        told = {"rank": rank, "incarnation": incarnation, "at": time.time(), **outcome}
        self._create_json(f"exits/{rank:05d}-{incarnation:05d}.json", told)

    def frozen(self, part: str, mine: Sequence[Checksum] | None = None) -> list[Checksum] | None:
        """What is recorded of the parameters that nobody trains; `mine` is recorded if nothing is yet."""
        if mine:
            self._create_json(f"frozen{part}.json", {"parameters": [list(checksum) for checksum in mine]})
        fields = self._read_json(f"frozen{part}.json")
        return None if fields is None else [Checksum(*checksum) for checksum in fields["parameters"]]

    def log(self, entry: LogEntry) -> None:
        self._create_json(f"log/{entry.name}/{entry.round:0{ROUND_DIGITS}d}.json", asdict(entry))

    # States.

    def save(self, state: State, writer: int = 0, writers: int = 1) -> None:
        """Write what is one writer's of a state, in one piece or several. Those of all together are the state."""
        arrays = [np.ascontiguousarray(a) for a in (*state.parameters, *(state.velocity or ()), *state.buffers)]
        total = sum(a.nbytes for a in arrays)
        each = max(1, -(-total // (writers * LARGEST_PIECE)))
        for piece in range(writer * each, (writer + 1) * each):
            self._save(state, arrays, total, piece, writers * each)

    def _save(self, state: State, arrays: Sequence[Array], total: int, piece: int, pieces: int) -> None:
        start, stop = total * piece // pieces, total * (piece + 1) // pieces
        record, _ = seal(
            {
                "kind": "state",
                "run": self.run_id,
                "name": state.name,
                "round": state.round,
                "chain": state.chain,
                "expected": list(state.expected),
                "samples": state.samples,
                "digest": state.digest,
                "arrays": _kinds(state.parameters),
                **({"buffers": _kinds(state.buffers)} if state.buffers else {}),
                "velocity": None if state.velocity is None else bool(state.velocity),
                "start": start,
                "stop": stop,
            }
        )
        key = f"{self._states(state.name, state.round)}{piece:05d}-of-{pieces:05d}"
        buffers = [*_span(arrays, start, stop), memoryview(record)]
        self.store.put_if_absent(key, sum(len(b) for b in buffers), iter(buffers))

    def newest(self, name: str, at_least: int = 0) -> State | None:
        """The newest state of a fragment that is complete and genuine."""
        for pieces in self._complete(name, at_least):
            state = self._load(pieces)
            if state is not None:
                return state
        return None

    def newest_fields(self, name: str) -> Mapping[str, Any] | None:
        """Return the record of the newest complete state, without reading it; `size` is its bytes."""
        for pieces in self._complete(name, 0):
            records = self._records(pieces)
            if records is not None:
                return {**records[0].fields, "size": max(record.fields["stop"] for record in records)}
        return None

    def state_names(self) -> list[str]:
        """The fragments that have states."""
        prefix = f"{self.run_id}/states/"
        return sorted({found.key.removeprefix(prefix).partition("/")[0] for found in self.store.list(prefix)})

    def _complete(self, name: str, at_least: int) -> list[list[Found]]:
        """The pieces of states of which all are there, the newest state first."""
        groups = self._groups(name)
        whole = [key for key, pieces in groups.items() if key[0] >= at_least and len(pieces) == key[1]]
        return [groups[key] for key in sorted(whole, reverse=True)]

    def _groups(self, name: str) -> dict[tuple[int, int], list[Found]]:
        """Return the pieces of states, by round and by how many pieces they should have."""
        prefix = f"{self.run_id}/states/{name}/"
        groups: dict[tuple[int, int], list[Found]] = {}
        for found in self.store.list(prefix):
            matched = _PIECE.fullmatch(found.key.removeprefix(prefix))
            if matched is not None:
                groups.setdefault((int(matched[1]), int(matched[2])), []).append(found)
        return groups

    def _records(self, pieces: Sequence[Found]) -> list[Record] | None:
        """None if one was removed meanwhile, or is torn."""
        try:
            return [self._driver.run(read_record(found), Traffic()) for found in pieces]
        except Torn:
            return None

    def forget_states(self, name: str, before: int) -> int:
        """Remove states of fewer rounds, but not the last ones that are complete; how many objects that were."""
        groups = self._groups(name)
        complete = sorted((round for (round, of), pieces in groups.items() if len(pieces) == of), reverse=True)
        kept = complete[:STATES_KEPT]
        first = min(before, *kept) if kept else 0
        old = [found.key for (round, _), pieces in groups.items() if round < first for found in pieces]
        if old:
            self.store.delete(old)
        return len(old)

    def _states(self, name: str, round: int) -> str:
        return f"{self.run_id}/states/{name}/{round:0{ROUND_DIGITS}d}/"

    def _load(self, pieces: Sequence[Found]) -> State | None:
        """None if it was removed meanwhile, or a piece is torn or of another state."""
        records = self._records(pieces)
        if records is None:
            return None
        fields = records[0].fields
        total = max(record.fields["stop"] for record in records)
        memory = np.empty(total, np.uint8)
        for found, record in zip(pieces, records, strict=True):
            start, stop = record.fields["start"], record.fields["stop"]
            view = memoryview(memory)[start:stop]  # type: ignore[arg-type]  # their stubs hide that arrays are buffers
            got = self.store.read(Range(found.key, 0, stop - start, view)) if stop > start else view
            if got is None or len(got) != stop - start:
                return None
        arrays, offset = _cut(memory, fields["arrays"], 0)
        velocity: list[Array] | None = None if fields["velocity"] is None else []
        if fields["velocity"]:
            velocity, offset = _cut(memory, fields["arrays"], offset)
        buffers, offset = _cut(memory, fields.get("buffers", ()), offset)
        if offset != total or fingerprint(arrays, velocity, buffers) != fields["digest"]:
            return None
        return State(
            name=fields["name"],
            round=fields["round"],
            chain=fields["chain"],
            expected=tuple(fields["expected"]),
            samples=fields["samples"],
            parameters=arrays,
            velocity=velocity,
            digest=fields["digest"],
            buffers=buffers,
        )

    # Small documents.

    def documents(self, kind: str) -> list[dict[str, Any]]:
        """Return all JSON documents below `members`, `exits` or `log`, in the order of their keys."""
        documents = []
        for found in self.store.list(f"{self.run_id}/{kind}/"):
            told = self._read_json(found.key.removeprefix(f"{self.run_id}/"))
            if told is not None:
                _check_fields(told, NEEDED[kind], found.key)
                documents.append(told)
        return documents

    def _create_json(self, key: str, fields: Mapping[str, Any]) -> bool:
        data = json.dumps(fields, sort_keys=True, default=str).encode()
        return self.store.put_if_absent(f"{self.run_id}/{key}", len(data), iter([memoryview(data)]))

    def _read_json(self, key: str) -> dict[str, Any] | None:
        size = 1 << 16
        data = self.store.read(Range(f"{self.run_id}/{key}", 0, size))
        while data is not None and len(data) == size:  # it may go on
            size *= 8
            data = self.store.read(Range(f"{self.run_id}/{key}", 0, size))
        if data is None:
            return None
        try:
            told = json.loads(bytes(data))
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise RoundError(f"{self.run_id}/{key}", "is no JSON object; remove it")
        return told


def _check_fields(told: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    missing = next((name for name in needed if name not in told), None)
    if missing is not None:
        raise RoundError(where, f"has no {missing!r}: no replica of this version has written it; remove it")


def _span(arrays: Sequence[Array], start: int, stop: int) -> list[memoryview]:
    """Bytes `start` to `stop` of arrays that lie one behind the other."""
    found, offset = [], 0
    for array in arrays:
        begin, end = max(start - offset, 0), min(stop - offset, array.nbytes)
        if begin < end:
            found.append(memoryview(array.reshape(-1).view(np.uint8)[begin:end]))  # type: ignore[arg-type]
        offset += array.nbytes
    return found


def _kinds(arrays: Sequence[Array]) -> list[Any]:
    return [[array.dtype.name, list(array.shape)] for array in arrays]


def _cut(memory: Array, kinds: Sequence[Any], offset: int) -> tuple[list[Array], int]:
    arrays = []
    for name, shape in kinds:
        dtype = np.dtype(name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        piece = memory[offset : offset + size]
        # Where other arrays end decides where this one begins: not always at a multiple of its numbers' size.
        aligned = piece if offset % dtype.itemsize == 0 else piece.copy()
        arrays.append(aligned.view(dtype).reshape(shape))
        offset += size
    return arrays, offset


def _last_number(key: str) -> int:
    return int(key.rpartition("-")[2].partition(".")[0])
