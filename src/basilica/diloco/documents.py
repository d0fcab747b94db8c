"""The objects of a round and their keys: parts, manifests, results and failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from basilica.diloco.effects import Flow, Found, Range, fetch
from basilica.diloco.errors import BarrierTimeout, CorruptPart, RoundConflict, RoundError
from basilica.diloco.records import TAIL, Gone, Record, Torn, missing_bytes, seal, unseal

ROUND_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """One round of one all-reduce of one run, and the keys of its objects."""

    run: str
    name: str
    round: int

    def __str__(self) -> str:
        return f"round {self.round} of {self.name!r} in run {self.run!r}"

    @property
    def home(self) -> str:
        """Holds all rounds of the all-reduce, in their order."""
        return f"{self.run}/rounds/{self.name}/"

    @property
    def prefix(self) -> str:
        return f"{self.home}{self.round:0{ROUND_DIGITS}d}/"

    def part(self, rank: int) -> str:
        return f"{self.prefix}part-{rank:05d}"

    def manifest(self, attempt: int) -> str:
        return f"{self.prefix}manifest-{attempt:03d}"

    def result(self, attempt: int, shard: int) -> str:
        return f"{self.prefix}result-{attempt:03d}-{shard:05d}"

    def joining(self, round: int) -> str:
        """Below it, the ranks that want to be expected in that round."""
        return f"{self.run}/joins/{self.name}/{round:0{ROUND_DIGITS}d}-"

    def rank_of(self, key: str) -> int | None:
        """Return the rank of a part by its key; None for another object."""
        text = key.removeprefix(f"{self.prefix}part-")
        return int(text) if text != key and text.isdecimal() else None

    def round_of(self, key: str) -> int | None:
        """The round to which a key below `home` belongs."""
        text = key.removeprefix(self.home).partition("/")[0]
        return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The facts that all parts of a round must agree on.

    `base` proves that they started from the same state; the shards are divided between the `expected` ranks, in order.
    `settings` are the caller's, of no meaning here.
    """

    place: Place
    base: str
    expected: tuple[int, ...]
    quorum: int | None
    layout: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return {
            "run": self.place.run,
            "name": self.place.name,
            "round": self.place.round,
            "base": self.base,
            "expected": list(self.expected),
            "quorum": self.quorum,
            "layout": list(self.layout),
            "settings": dict(self.settings),
        }

    def difference(self, theirs: Mapping[str, Any]) -> str | None:
        """Return the first difference of a record, in words; None if it agrees."""
        settings = theirs.get("settings") or {}
        compared = [(name, theirs.get(name), mine) for name, mine in self.fields().items() if name != "settings"]
        compared += [(name, settings.get(name), self.settings.get(name)) for name in {**self.settings, **settings}]
        for name, there, here in compared:
            if there != here:
                return f"{name} is {there!r} there and {here!r} here"
        return None


class Version(NamedTuple):
    """Later parts of a rank may replace earlier ones: of a later start, or written again because one was damaged."""

    incarnation: int
    repair: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """The record of a part."""

    rank: int
    weight: float
    version: Version
    digests: tuple[str, ...]
    id: str
    record: Record

    @staticmethod
    def fields(terms: Terms, rank: int, weight: float, version: "Version", digests: Sequence[str]) -> dict[str, Any]:
        mine = {"rank": rank, "weight": weight, "version": list(version), "digests": list(digests)}
        return {"kind": "part", **terms.fields(), **mine}

    @staticmethod
    def parse(record: Record | Torn) -> "Part":
        """`Torn` if it is none."""
        if isinstance(record, Torn):
            raise record
        fields = record.fields
        if fields.get("kind") != "part":
            raise Torn("is not a part")
        version = Version(*fields["version"])
        return Part(fields["rank"], fields["weight"], version, tuple(fields["digests"]), record.id, record)


@dataclass(frozen=True, slots=True)
class Member:
    weight: float
    part: str
    version: Version


@dataclass(frozen=True, slots=True)
class Manifest:
    """The counted replicas, in the order of their ranks; `following` are the ranks that the next round expects."""

    attempt: int
    members: Mapping[int, Member]
    following: tuple[int, ...]
    id: str

    @staticmethod
    def fields(terms: Terms, attempt: int, parts: Mapping[int, Part], following: Sequence[int]) -> dict[str, Any]:
        members = [
            {"rank": part.rank, "weight": part.weight, "part": part.id, "version": list(part.version)}
            for _, part in sorted(parts.items())
        ]
        return {
            "kind": "manifest",
            **terms.fields(),
            "attempt": attempt,
            "members": members,
            "following": list(following),
        }

    @staticmethod
    def parse(record: Record) -> "Manifest":
        fields = record.fields
        members = {m["rank"]: Member(m["weight"], m["part"], Version(*m["version"])) for m in fields["members"]}
        return Manifest(fields["attempt"], members, tuple(fields["following"]), record.id)

    def owner(self, shard: int, expected: Sequence[int]) -> int:
        """Return the rank that reduces a shard: the shard's own or, if that is not counted, one of the others."""
        ranks = sorted(self.members)
        return expected[shard] if expected[shard] in self.members else ranks[shard % len(ranks)]


def result_fields(manifest: Manifest, shard: int, digests: Sequence[str]) -> dict[str, Any]:
    return {"kind": "result", "manifest": manifest.id, "shard": shard, "digests": list(digests)}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt gave nothing, as it stands in the register `key`: the same words for everybody."""

    key: str
    error: str
    """`timeout`, `conflict`, `corrupt`; or `lost`, `restarted`: then all go on to the next attempt by themselves."""
    ranks: tuple[int, ...] = ()
    text: str = ""
    waited: float = 0.0

    @property
    def fields(self) -> dict[str, Any]:
        told = {"error": self.error, "ranks": list(self.ranks), "text": self.text, "waited": self.waited}
        return {"kind": "failure", **told}

    @staticmethod
    def parse(key: str, fields: Mapping[str, Any]) -> "Failure":
        return Failure(key, fields["error"], tuple(fields["ranks"]), fields["text"], fields["waited"])

    def exception(self, place: Place) -> RoundError:
        match self.error:
            case "timeout":
                return BarrierTimeout(str(place), self.ranks, self.waited)
            case "conflict":
                return RoundConflict(str(place), self.text)
            case _:
                return CorruptPart(str(place), self.key, self.text)


def read_record(found: Found, hint: int = 0) -> Flow[Record]:
    """The record at the end of an object; `Torn` if there is none. `hint`: how many checksums it may hold."""
    (record,) = yield from read_records([found], hint)
    if isinstance(record, Torn):
        raise record
    return record


def read_records(found: Sequence[Found], hint: int = 0) -> Flow[list[Record | Torn]]:
    """The same of many objects at once, so that a large world costs no more time than a small one."""
    sizes = [min(f.size, TAIL + 20 * hint) for f in found]
    ranges = [Range(f.key, f.size - size, size) for f, size in zip(found, sizes, strict=True)]
    tails = (yield from fetch(*ranges)) if ranges else []
    records: list[Record | Torn] = []
    for f, size, tail in zip(found, sizes, tails, strict=True):
        try:
            records.append((yield from _record_in(f, size, tail)))
        except Torn as torn:
            records.append(torn)
    return records


def _record_in(found: Found, size: int, tail: memoryview | None) -> Flow[Record]:
    """From the last `size` bytes of an object, and more of them where the record is longer."""
    if tail is None:
        raise Gone("is gone")
    more = missing_bytes(tail)
    if more > found.size - size:
        raise Torn("is cut off at its beginning")
    if more:
        (tail,) = yield from fetch(Range(found.key, found.size - size - more, size + more))
        if tail is None:
            raise Gone("is gone")
    return unseal(tail)


def read_record_at(key: str, start: int, hint: int) -> Flow[Record]:
    """The record of an object whose payload ends at `start`: no listing is needed, which may be old."""
    (tail,) = yield from fetch(Range(key, start, 16 * TAIL + 20 * hint))
    if tail is None:
        raise Gone("is gone")
    return unseal(tail)


def sealed(fields: Mapping[str, Any]) -> tuple[memoryview, str]:
    """Return a record as bytes to be written, and its id."""
    text, id = seal(fields)
    return memoryview(text), id
