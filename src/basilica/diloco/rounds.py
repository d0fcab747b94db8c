"""One round as a pure protocol: a generator that yields its requests to the store, and returns the agreed outcome.

**Objects.** All lie under `<run>/rounds/<name>/<round>/`; nothing of another run, all-reduce or round can be there.

    part-<rank>                 the input of a replica: its chunks, then a record with their checksums and its weight
    manifest-<attempt>          the counted replicas: ranks, weights and the *ids* of their parts
    result-<attempt>-<shard>    the mean of a shard, then a record with its checksums

**Course.** A replica writes its part, waits until all parts are there, and tries to create the manifest. It reads the
manifest that exists, reduces its own shards in rank order, creates their results and reads the others'. No other
replica reduces its own shard, so a part omits that range: once the size of the arrays goes up and less than twice the
size comes down, whatever the world.

**Why no two replicas see different outcomes.** Manifests and results are *registers*: created once, on condition that
they are not there, and never overwritten. A failure is written into the same registers, in the place of the object it
prevents: a time-out into the manifest or the result that did not come, a corrupt part into the result that needs it.
So every replica reads the same content from a register. An attempt succeeds if all of its registers hold a manifest or
result, and fails if one does not; only a replica that has seen an attempt fail begins the next. So at most one attempt
of a round succeeds. Results are removed long after; a replica that then finds a register empty reads a later manifest,
and manifests are never removed.

**Why no mean is wrong.** A manifest names parts by id, the checksum of a record that holds the checksums of all
chunks. Bytes are used only if they match: a torn, overwritten, foreign or stale part does not, whatever else happens.

**Restarts.** All attempts share the parts. A replica that restarts with the same numbers finds its part and continues.
A restarted replica (a higher incarnation) with other numbers replaces its part; if a manifest names the old one
already, that attempt fails and all replicas begin the next. The same incarnation with other numbers is a second replica
that claims the rank: `RoundConflict`.

**Elastic.** With a quorum, a manifest may be created without the stragglers once enough are there and a grace time has
passed, which grows with the gaps between arrivals. A counted replica that dies before its results are there is fenced
by a failure in its register, and the next attempt runs without it. Replicas that were not counted read the result, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from basilica.diloco.arithmetic import Numbers
from basilica.diloco.deadlines import Patience, Settings
from basilica.diloco.documents import Failure, Manifest, Part, Terms, Version, read_record, read_records, sealed
from basilica.diloco.effects import Create, Flow, Found, List, Now, Put, Range, fetch
from basilica.diloco.errors import RoundConflict
from basilica.diloco.exchange import Exchange
from basilica.diloco.records import Record, Torn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a round. The mean itself is in the arrays that were passed in as target."""

    round: int
    attempt: int
    weights: Mapping[int, float]
    """The counted replicas, with their weights."""
    counted: bool
    following: tuple[int, ...]
    """The ranks that the next round expects."""
    chain: str
    """The checksum of this outcome and all before it: equal only if every bit of them is."""
    waited: float
    waited_for: int | None = None
    """A rank that did not come, else the one that came last while this replica waited; None if neither is known."""


class Round:
    """One replica's course through one round."""

    def __init__(
        self, terms: Terms, rank: int, weight: float, numbers: Numbers, settings: Settings, *, incarnation: int = 0
    ) -> None:
        self.terms, self.rank, self.weight, self.version = terms, rank, weight, Version(incarnation)
        self.place, self.numbers, self.settings = terms.place, numbers, settings
        self.patience = Patience(settings, self.place.prefix)
        self.exchange = Exchange(terms, rank, numbers, settings, self.patience)
        self._parts: dict[int, Part] = {}
        self._torn: dict[int, str] = {}
        self._arrivals: list[float] = []
        self._latest: int | None = None
        """The rank whose part came last while this replica waited for parts."""
        self._damaged: dict[int, int] = {}
        """Ranks whose part was found damaged, and the repair number from which a rewritten part is accepted."""

    def play(self) -> Flow[Outcome]:
        """Play the whole round; raises the errors of `errors`."""
        listing = yield from self._look()
        over_before = frozenset(listing)
        yield from self._contribute(listing)
        lost: frozenset[int] = frozenset()
        for attempt in count():
            agreed = yield from self._agree(attempt, lost)
            ended = agreed if isinstance(agreed, Failure) else (yield from self._follow(agreed))
            if isinstance(ended, Outcome):
                return ended
            yield from self._check_genuine(attempt)
            if ended.error == "lost":
                lost |= frozenset(ended.ranks)
            elif ended.error != "restarted" and ended.key not in over_before:
                raise ended.exception(self.place)
            # This attempt was over before this call began, or all replicas abandon it together.
            if ended.error == "corrupt":
                self._damaged |= {rank: attempt + 1 for rank in ended.ranks}
            listing = yield from self._look()
            yield from self._contribute(listing)
        raise AssertionError("attempts do not end")

    def _check_genuine(self, attempt: int) -> Flow[None]:
        """Raise if the failure of an attempt is in a register that was removed with its round, and then created anew.

        In that case the next round has begun and this one has no further attempt: manifests are never removed.
        """
        (further,) = yield from fetch(Range(self.place.manifest(attempt + 1), 0, 1))
        if further is None:
            yield from self.exchange.check_not_gone()

    def _look(self) -> Flow[dict[str, Found]]:
        listing: tuple[Found, ...] = yield List(self.place.prefix)
        return {found.key: found for found in listing}

    # The part.

    def _contribute(self, listing: Mapping[str, Found]) -> Flow[None]:
        """Write my part unless it is there and complete, or is not needed any more."""
        key = self.place.part(self.rank)
        while key not in listing:
            if (yield from self._too_late(listing)) or (yield Create(key, self._part_size(), self._part_buffers())):
                return
            yield from self.patience.pause()
            listing = yield from self._look()
        if (yield from self._to_be_written(listing[key])):
            yield Put(key, self._part_size(), self._part_buffers())

    def _too_late(self, listing: Mapping[str, Found]) -> Flow[bool]:
        """Return whether the round was agreed without me: with a quorum, its result needs no part of mine."""
        manifests = sorted(key for key in listing if key.startswith(f"{self.place.prefix}manifest-"))
        if self.settings.quorum is None or not manifests:
            return False
        stands = yield from self._read_manifest(listing[manifests[-1]])
        return isinstance(stands, Manifest) and self.rank not in stands.members

    def _to_be_written(self, found: Found) -> Flow[bool]:
        """Return whether the existing part of my rank is torn or outdated; raise if another replica wrote it."""
        try:
            theirs = Part.parse((yield from read_record(found, len(self.numbers.layout.chunks))))
        except Torn:
            return True
        same = Part.fields(self.terms, self.rank, self.weight, theirs.version, self._digests())
        difference = next((name for name in same if same[name] != theirs.record.fields.get(name)), None)
        needed = self._damaged.get(self.rank, 0)
        if difference is None:
            self.version = theirs.version._replace(repair=max(theirs.version.repair, needed))
            return found.size != self._part_size() or theirs.version != self.version
        if theirs.version.incarnation < self.version.incarnation:
            self.version = self.version._replace(repair=needed)
            return True
        raise RoundConflict(
            str(self.place),
            f"rank {self.rank} has given something else already: its {difference} differs. If two replicas claim this "
            "rank, end one of them; if this one was started again and computed other numbers, say so with a higher "
            "incarnation; if those are leftovers of an earlier run, use another run_id",
        )

    def _digests(self) -> list[str]:
        return [self.numbers.digest(index) for index in range(len(self.numbers.layout.chunks))]

    def _id_of(self, version: Version) -> str:
        """Return the id of my part in that version: every version has my numbers."""
        return sealed(Part.fields(self.terms, self.rank, self.weight, version, self._digests()))[1]

    def _part_fields(self, digests: list[str]) -> dict[str, Any]:
        return Part.fields(self.terms, self.rank, self.weight, self.version, digests)

    def _part_size(self) -> int:
        layout = self.numbers.layout
        record, _ = sealed(self._part_fields(["0" * 16] * len(layout.chunks)))
        begin, end = layout.span(self.exchange.left_out(self.rank))
        return layout.wire_bytes - (end - begin) + len(record)

    def _part_buffers(self) -> Iterator[memoryview]:
        left_out = self.exchange.left_out(self.rank)
        for index in range(len(self.numbers.layout.chunks)):
            self.numbers.digest(index)  # now, while the chunk is in the processor's cache
            if index not in left_out:
                yield self.numbers.wire(index)
        yield sealed(self._part_fields(self._digests()))[0]

    # The manifest.

    def _agree(self, attempt: int, lost: frozenset[int]) -> Flow[Manifest | Failure]:
        """Wait until the manifest of this attempt exists, or create it."""
        key = self.place.manifest(attempt)
        began = yield Now()
        self.patience.reset()
        self._parts, self._torn, self._arrivals, self._latest = {}, {}, [], None
        while True:
            listing = yield from self._look()
            if key in listing:
                return (yield from self._read_manifest(listing[key]))
            known = set(self._parts)
            fields = yield from self._meet(listing)
            if known:
                self._latest = next((rank for rank in self._parts if rank not in known), self._latest)
            if fields is None:
                fields = self._decide(attempt, lost, began, (yield Now()))
            if fields is None:
                yield from self.patience.pause()
                continue
            if fields["kind"] == "manifest" and self.settings.quorum is not None:
                fields["following"] = yield from self._following(fields["following"])
            record, id = sealed(fields)
            if (yield Create(key, len(record), iter([record]))):
                return _parsed(key, Record(fields, id, len(record)))
            yield from self.patience.pause()

    def _read_manifest(self, found: Found) -> Flow[Manifest | Failure]:
        try:
            record = yield from read_record(found)
        except Torn as torn:
            return Failure(found.key, "corrupt", text=str(torn))
        if record.fields["kind"] == "manifest" and (difference := self.terms.difference(record.fields)):
            text = f"rank {self.rank} disagrees with the manifest: {difference}"
            raise RoundConflict(str(self.place), text)
        return _parsed(found.key, record)

    def _meet(self, listing: Mapping[str, Found]) -> Flow[dict[str, Any] | None]:
        """Read the records of new parts; return a failure, which ends this attempt, if one differs from our terms."""
        ranks = {rank: found for key, found in listing.items() if (rank := self.place.rank_of(key)) is not None}
        new = [(rank, found) for rank, found in ranks.items() if rank not in self._parts]
        records = yield from read_records([found for _, found in new], len(self.numbers.layout.chunks))
        for (rank, found), record in zip(new, records, strict=True):
            try:
                part = Part.parse(record)
            except Torn as torn:
                self._torn[rank] = str(torn)
                continue
            difference = self.terms.difference(part.record.fields)
            if difference or part.rank != rank:
                text = f"rank {rank} and rank {self.rank} disagree: {difference or f'it says it is {part.rank}'}"
                return Failure(found.key, "conflict", (rank, self.rank), text).fields
            self._torn.pop(rank, None)
            if part.version.repair < self._damaged.get(rank, 0):
                continue  # still the damaged part
            self._parts[rank] = part
            self._arrivals.append((yield Now()))
            self.patience.reset()
        return None

    def _decide(self, attempt: int, lost: frozenset[int], began: float, now: float) -> dict[str, Any] | None:
        """Return the content of the manifest, given the parts so far; None to continue waiting. Pure."""
        quorum, expected = self.settings.quorum, set(self.terms.expected)
        wanted = expected - lost if quorum is not None and len(expected - lost) >= quorum else expected
        counted = {rank: part for rank, part in self._parts.items() if rank in wanted or rank not in expected}
        complete = wanted <= counted.keys()
        enough = quorum is not None and len(counted) >= quorum and now >= self._closes_at()
        if complete or enough:
            if not any(part.weight for part in counted.values()):
                return Failure("", "conflict", text="all weights are 0: nobody has seen a sample").fields
            return Manifest.fields(self.terms, attempt, counted, sorted(counted if quorum is not None else expected))
        if now - began < self.settings.timeout:
            return None
        missing = sorted(wanted - counted.keys())
        torn = {rank: self._torn[rank] for rank in missing if rank in self._torn}
        if torn:
            text = "; ".join(f"the part of rank {rank} {problem}" for rank, problem in torn.items())
            return Failure("", "corrupt", tuple(torn), text).fields
        return Failure("", "timeout", tuple(missing), waited=self.settings.timeout).fields

    def _closes_at(self) -> float:
        """Return when the grace time ends, counted anew from each arrival; later where arrivals have been far apart."""
        gaps = [later - earlier for earlier, later in zip(self._arrivals, self._arrivals[1:], strict=False)]
        return self._arrivals[-1] + max([self.settings.grace, *(2 * gap for gap in gaps)])

    def _following(self, counted: list[int]) -> Flow[list[int]]:
        """Return the counted ranks and the ranks that announced themselves for the next round."""
        prefix = self.place.joining(self.place.round + 1)
        announced: tuple[Found, ...] = yield List(prefix)
        return sorted({*counted, *(int(found.key.removeprefix(prefix)) for found in announced)})

    # The outcome.

    def _follow(self, manifest: Manifest) -> Flow[Outcome | Failure]:
        member = manifest.members.get(self.rank)
        if member is None or member.part == self._id_of(member.version):
            chain = yield from self.exchange.run(manifest, self._parts, reduces=member is not None)
        elif member.version.incarnation < self.version.incarnation:
            chain = yield from self.exchange.run(manifest, self._parts, reduces=False, withdraw=True)
        else:
            text = f"somebody else's part is counted for rank {self.rank}: two replicas claim it; end one of them"
            raise RoundConflict(str(self.place), text)
        if isinstance(chain, Failure):
            return chain
        return Outcome(
            round=self.place.round,
            attempt=manifest.attempt,
            weights={rank: member.weight for rank, member in manifest.members.items()},
            counted=member is not None,
            following=manifest.following,
            chain=chain,
            waited=self.patience.waited,
            waited_for=None if member is None else self._waited_for(manifest),
        )

    def _waited_for(self, manifest: Manifest) -> int | None:
        """Return the awaited rank, by the listings before the manifest existed; parts in the first were not awaited."""
        absent = [rank for rank in self.terms.expected if rank not in manifest.members]
        unmet = sorted(manifest.members.keys() - self._parts.keys()) if self._parts else []
        return next(iter([*absent, *unmet]), self._latest)


def _parsed(key: str, record: Record) -> Manifest | Failure:
    return Failure.parse(key, record.fields) if record.fields["kind"] == "failure" else Manifest.parse(record)
