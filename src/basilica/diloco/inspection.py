"""The inspection of a run's prefix: its rounds, members, ends and sizes; and the objects that no replica needs."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from basilica.diloco.bucket import Bucket, RunRecord
from basilica.diloco.documents import ROUND_DIGITS
from basilica.diloco.effects import Found, Range
from basilica.diloco.stores.port import LeavesDrafts, ObjectStore

RUN_FILE = "run.json"
ROUNDS_IN_USE = 3
"""Of a run that goes on, so many finished rounds may still be read by a replica that is late."""
DRAFT_SECONDS = 3600.0
"""A draft without a write for so long counts as abandoned, unless its writer is alive."""
KINDS = ("rounds", "states", "log", "members", "exits", "joins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One start of a replica, and its end; `outcome` is empty if it has recorded none."""

    rank: int
    incarnation: int
    host: str
    at: float
    outcome: str
    error: str
    troubles: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The newest complete state of one fragment. `digest` and `chain` are equal only for equal runs."""

    name: str
    round: int
    samples: float
    digest: str
    chain: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    run_id: str
    record: RunRecord | None
    rounds: Sequence[Mapping[str, Any]]
    members: Sequence[Member]
    agreed: Sequence[Agreed]
    results: Mapping[int, Mapping[str, Any]]
    objects: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def troubles(self) -> list[str]:
        """The last recorded failures of work that no round depends on, such as the removal of old rounds."""
        newest = {entry["name"]: entry for entry in self.rounds}
        ended = {member.rank: member for member in self.members if member.outcome}
        told = [text for entry in newest.values() for text in entry.get("troubles", ())]
        told += [text for member in ended.values() for text in member.troubles]
        return list(dict.fromkeys(told))

    @property
    def unaccounted(self) -> list[int]:
        """Ranks whose last start has recorded no end: they run, or were killed."""
        last: dict[int, str] = {member.rank: member.outcome for member in self.members}
        return sorted(rank for rank, outcome in last.items() if not outcome)


def find_runs(store: ObjectStore) -> list[str]:
    """The runs that are kept in a store, by their ids."""
    return sorted({f.key.partition("/")[0] for f in store.list("") if f.key.endswith(f"/{RUN_FILE}")})


def inspect_run(bucket: Bucket) -> Inspection:
    """Read all that is small; of what is large only its size."""
    listing = bucket.store.list(f"{bucket.run_id}/")
    ends = {(fields["rank"], fields["incarnation"]): fields for fields in bucket.documents("exits")}
    members = []
    for start in bucket.documents("members"):
        end = ends.get((start["rank"], start["incarnation"]), {})
        members.append(
            Member(
                rank=start["rank"],
                incarnation=start["incarnation"],
                host=start["host"],
                at=start["at"],
                outcome=end.get("outcome", ""),
                error=end.get("error", ""),
                troubles=tuple(end.get("troubles", ())),
            )
        )
    by_kind = _by_kind(bucket.run_id, listing)
    return Inspection(
        run_id=bucket.run_id,
        record=bucket.record(),
        rounds=sorted(bucket.documents("log"), key=lambda entry: (entry["round"], entry["name"])),
        members=members,
        agreed=_agreed(bucket),
        results=_results(bucket.store),
        objects={kind: len(found) for kind, found in by_kind.items()},
        sizes={kind: sum(f.size for f in found) for kind, found in by_kind.items()},
    )


def _by_kind(run_id: str, listing: Iterable[Found]) -> dict[str, list[Found]]:
    kinds: dict[str, list[Found]] = defaultdict(list)
    for found in listing:
        kind = found.key.removeprefix(f"{run_id}/").partition("/")[0]
        if kind in KINDS:
            kinds[kind].append(found)
    return dict(kinds)


def _agreed(bucket: Bucket) -> list[Agreed]:
    recorded = [bucket.newest_fields(name) for name in bucket.state_names()]
    return [
        Agreed(**{name: fields[name] for name in ("name", "round", "samples", "digest", "chain", "size")})
        for fields in recorded
        if fields is not None
    ]


def _results(store: ObjectStore) -> dict[int, Mapping[str, Any]]:
    """Return the results of the replicas, from the place where their entrypoint stored them."""
    results = {}
    for found in store.list("results/"):
        rank = found.key.removeprefix("results/").removesuffix(".json")
        data = store.read(Range(found.key, 0, found.size))
        if rank.isdecimal() and data is not None:
            results[int(rank)] = json.loads(bytes(data))
    return results


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects that no replica needs."""

    keys: tuple[str, ...]
    size: int


def garbage(bucket: Bucket, *, unfinished: bool = False) -> Garbage:
    """What lies before the newest complete states, and drafts whose writers were killed; with `unfinished` also what
    was begun after those states, and not agreed on.

    Manifests of finished rounds stay: they are small, and while one stands its round cannot be decided a second time.
    `unfinished` is for a run in which nothing runs any more: its next replicas begin the round anew, in whatever world.
    """
    done = {state.name: state.round for state in _agreed(bucket)}
    wanted = [
        found
        for found in bucket.store.list(f"{bucket.run_id}/")
        if _is_garbage(found.key.removeprefix(f"{bucket.run_id}/").split("/"), done, unfinished=unfinished)
    ]
    wanted += leftovers(bucket)
    return Garbage(tuple(found.key for found in wanted), sum(found.size for found in wanted))


def leftovers(bucket: Bucket) -> tuple[Found, ...]:
    """Return the drafts of killed writers; only some stores have them."""
    store = bucket.store
    return store.leftovers(f"{bucket.run_id}/", DRAFT_SECONDS) if isinstance(store, LeavesDrafts) else ()


def sweep(bucket: Bucket) -> None:
    """Remove those objects. An object that cannot be removed, perhaps of another owner, does no harm."""
    with suppress(OSError):
        bucket.store.delete([found.key for found in leftovers(bucket)])


def _is_garbage(path: Sequence[str], done: Mapping[str, int], *, unfinished: bool) -> bool:
    """Pure. `done`: rounds that are in the newest complete state of each fragment."""
    if len(path) < 3 or path[0] not in ("rounds", "states", "joins"):
        return False
    kind, name, rest = path[0], path[1], path[2]
    number, agreed = rest[:ROUND_DIGITS], done.get(name)
    if agreed is None or not number.isdecimal():
        return False
    if kind == "states":
        return int(number) < agreed
    if int(number) >= agreed:
        return unfinished
    if not unfinished and int(number) >= agreed - ROUNDS_IN_USE:
        return False
    return kind == "joins" or not path[-1].startswith("manifest-")


def collect_garbage(bucket: Bucket, found: Garbage) -> None:
    if found.keys:
        bucket.store.delete(found.keys)
