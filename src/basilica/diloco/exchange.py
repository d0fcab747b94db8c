"""The second half of a round: a replica reduces its own shards, and reads the means of the other shards."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from basilica.diloco.arithmetic import Numbers
from basilica.diloco.deadlines import Patience, Settings
from basilica.diloco.documents import (
    Failure,
    Manifest,
    Part,
    Place,
    Terms,
    read_record_at,
    read_records,
    result_fields,
    sealed,
)
from basilica.diloco.effects import Begin, Create, Finish, Flow, Found, List, Now, Range, fetch
from basilica.diloco.errors import CorruptPart, RoundGone
from basilica.diloco.records import Gone, Record, Torn, digest

CHECKS = tuple(4 * 2**n for n in range(16))
"""The listings without an awaited result after which the replica checks whether the round was removed long ago."""
READ_AHEAD = 8
"""Pieces of results that are read at a time: the only memory that reading needs."""
READS = 3
"""Reads of bytes that do not match their checksum before they are declared corrupt."""


class Exchange:
    """The work of one replica after a manifest was created."""

    def __init__(self, terms: Terms, rank: int, numbers: Numbers, settings: Settings, patience: Patience) -> None:
        self.terms, self.rank, self.numbers, self.settings, self.patience = terms, rank, numbers, settings, patience
        self.place, self.layout = terms.place, numbers.layout
        self._scratch: dict[tuple[int, int], bytearray] = {}

    def shard(self, index: int) -> range:
        return self.layout.shard(index, len(self.terms.expected))

    def left_out(self, rank: int) -> range:
        """Return the chunks that a rank's part omits, because only that rank reduces them."""
        return self.shard(self.terms.expected.index(rank)) if rank in self.terms.expected else range(0)

    def run(
        self, manifest: Manifest, parts: Mapping[int, Part], *, reduces: bool, withdraw: bool = False
    ) -> Flow[str | Failure]:
        """Reduce and read until all results of the attempt are here; return their chain, or the attempt's failure."""
        began = yield Now()
        shards = [index for index in range(len(self.terms.expected)) if self.shard(index)]
        ids: dict[int, str] = {}
        listing = yield from self._look()
        for index in shards:
            key = self.place.result(manifest.attempt, index)
            if manifest.owner(index, self.terms.expected) != self.rank or key in listing:
                continue
            if withdraw:
                # My numbers are no longer those that were counted, so no replica can compute this mean any more.
                failure = Failure(key, "restarted", (self.rank,))
                if (yield from self._fail(failure)):
                    return failure
            if reduces:
                made = yield from self._reduce(manifest, parts, index)
                if isinstance(made, Failure):
                    if (yield from self._fail(made)):
                        return made
                elif made is not None:
                    ids[index] = made
        spent = (yield Now()) - began
        gathered = yield from self._gather(manifest, [index for index in shards if index not in ids], ids, spent)
        if gathered is not None:
            return gathered
        if (yield from self._was_left(manifest.attempt)):
            return Failure(self.place.manifest(manifest.attempt), "restarted")
        return sealed({"base": self.terms.base, "manifest": manifest.id, "results": [ids[index] for index in shards]})[
            1
        ]

    def _look(self) -> Flow[dict[str, Found]]:
        listing: tuple[Found, ...] = yield List(self.place.prefix)
        return {found.key: found for found in listing}

    def _was_left(self, attempt: int) -> Flow[bool]:
        """Return whether a later attempt exists: this one failed, and its removed result was created anew."""
        (further,) = yield from fetch(Range(self.place.manifest(attempt + 1), 0, 1))
        return further is not None

    def _fail(self, failure: Failure) -> Flow[bool]:
        """Write a failure into its register; return False if the register is not empty."""
        record, _ = sealed(failure.fields)
        created: bool = yield Create(failure.key, len(record), iter([record]))
        return created

    # Our own shards.

    def _reduce(self, manifest: Manifest, parts: Mapping[int, Part], index: int) -> Flow[str | Failure | None]:
        """Compute the mean of a shard, create its result and return its id; None if a result exists already."""
        key = self.place.result(manifest.attempt, index)
        known = yield from self._records(manifest, parts, key)
        if isinstance(known, Failure):
            return known
        ranks = sorted(manifest.members)
        weights = [manifest.members[rank].weight for rank in ranks]
        digests: list[str] = []
        pieces = list(self._pieces(self.shard(index)))
        ticket = yield Begin(self._ranges(ranks, pieces[0], 0))
        for number, piece in enumerate(pieces):
            buffers: list[memoryview | None] = yield Finish(ticket)
            if number + 1 < len(pieces):
                ticket = yield Begin(self._ranges(ranks, pieces[number + 1], (number + 1) % 2))
            wires = dict(zip((rank for rank in ranks if rank != self.rank), buffers, strict=True))
            for chunk in piece:
                parts_of_chunk: list[memoryview] = []
                for rank in ranks:
                    wire = yield from self._chunk(rank, chunk, piece, wires.get(rank), known[rank].digests[chunk])
                    if wire is None:
                        return (yield from self._unfit(manifest, rank, key))
                    parts_of_chunk.append(wire)
                digests.append(self.numbers.reduce(chunk, parts_of_chunk, weights))
        record, id = sealed(result_fields(manifest, index, digests))
        begin, end = self.layout.span(self.shard(index))
        created = yield Create(key, end - begin + len(record), self._result_buffers(self.shard(index), record))
        return id if created else None

    def _unfit(self, manifest: Manifest, rank: int, key: str) -> Flow[Failure]:
        """Return why bytes do not match: the part is damaged, unless a later start of a rank has replaced its part."""
        known = yield from self._records(manifest, {}, key)
        if isinstance(known, Failure):
            return known
        return Failure(key, "corrupt", (rank,), f"cannot be made: the part of rank {rank} is damaged")

    def _result_buffers(self, chunks: range, record: memoryview) -> Iterator[memoryview]:
        yield from self.numbers.made(chunks)
        yield record

    def _records(self, manifest: Manifest, parts: Mapping[int, Part], key: str) -> Flow[dict[int, Part] | Failure]:
        """Return the records of all counted parts with the ids in the manifest, or a failure if one differs."""
        known: dict[int, Part] = {}
        for rank, member in manifest.members.items():
            part = parts.get(rank)
            if part is None or part.id != member.part:
                begin, end = self.layout.span(self.left_out(rank))
                start = self.layout.wire_bytes - (end - begin)
                try:
                    record = yield from read_record_at(self.place.part(rank), start, len(self.layout.chunks))
                    part = Part.parse(record)
                except Torn as torn:
                    return Failure(key, "corrupt", (rank,), f"cannot be made: the part of rank {rank} {torn}")
                if part.id != member.part:
                    return Failure(key, "restarted", (rank,))
            known[rank] = part
        return known

    def _pieces(self, chunks: range) -> Iterator[range]:
        """Yield the runs of chunks that are read at a time."""
        start = chunks.start
        for stop in range(start + 1, chunks.stop + 1):
            begin, end = self.layout.span(range(start, min(stop + 1, chunks.stop)))
            if stop == chunks.stop or end - begin > self.settings.piece_bytes:
                yield range(start, stop)
                start = stop

    def _ranges(self, ranks: list[int], piece: range, turn: int) -> tuple[Range, ...]:
        """Return one piece of every other part. Two sets of buffers alternate: one is read into, one is reduced."""
        return tuple(self._range(rank, piece, turn) for rank in ranks if rank != self.rank)

    def _range(self, rank: int, piece: range, turn: int) -> Range:
        begin, end = self.layout.span(piece)
        left_out = self.left_out(rank)
        skipped_from, skipped_to = self.layout.span(left_out)
        start = begin - (skipped_to - skipped_from) if left_out and begin >= skipped_to else begin
        buffer = self._scratch.get((rank, turn))
        if buffer is None or len(buffer) < end - begin:
            buffer = self._scratch[rank, turn] = bytearray(end - begin)
        return Range(self.place.part(rank), start, end - begin, memoryview(buffer)[: end - begin])

    def _chunk(
        self, rank: int, chunk: int, piece: range, wire: memoryview | None, expected: str
    ) -> Flow[memoryview | None]:
        """Return one replica's chunk after its checksum matched; None if it is missing or no repeated read matches."""
        if rank == self.rank:
            return self.numbers.wire(chunk)
        offset = self.layout.chunks[chunk].offset - self.layout.chunks[piece[0]].offset
        length = self.layout.chunks[chunk].length
        for _ in range(READS):
            if wire is None:
                break
            part = wire[offset : offset + length]
            if digest(part) == expected:
                return part
            offset = 0
            (wire,) = yield from fetch(self._range(rank, range(chunk, chunk + 1), 2))
        return None

    # The others' shards.

    def _gather(
        self, manifest: Manifest, missing: list[int], ids: dict[int, str], spent: float
    ) -> Flow[Failure | None]:
        """Read results as they appear; write a failure into a register that stays empty too long."""
        began = last = yield Now()
        looks = 0
        self.patience.reset()
        while missing:
            listing = yield from self._look()
            keys = {index: self.place.result(manifest.attempt, index) for index in missing}
            there = {index: listing[key] for index, key in keys.items() if key in listing}
            got = yield from self._read_results(manifest, there)
            if isinstance(got, Failure):
                return got
            if got:
                ids |= got
                missing = [index for index in missing if index not in got]
                last = yield Now()
                self.patience.reset()
            if not missing:
                return None
            now = yield Now()
            failure = self._overdue(manifest, missing, since_began=now - began, idle=now - last - 4 * spent)
            if failure is not None and (yield from self._fail(failure)):
                return failure
            looks += 1
            if looks in CHECKS:
                yield from self.check_not_gone()
            yield from self.patience.pause()
        return None

    def _overdue(self, manifest: Manifest, missing: list[int], *, since_began: float, idle: float) -> Failure | None:
        """Return the failure of the ranks that owe a result, if it is due. Pure. `idle`: seconds that one is late."""
        key = self.place.result(manifest.attempt, missing[0])
        owing = tuple(sorted({manifest.owner(index, self.terms.expected) for index in missing}))
        quorum = self.settings.quorum
        can_do_without = quorum is not None and len(manifest.members) - len(owing) >= quorum
        if can_do_without and idle >= self.settings.grace:
            return Failure(key, "lost", owing)
        if since_began >= self.settings.timeout:
            return Failure(key, "timeout", owing, waited=self.settings.timeout)
        return None

    def _read_results(self, manifest: Manifest, there: Mapping[int, Found]) -> Flow[dict[int, str] | Failure]:
        """Read the listed results; return the ids of those that still exist, by shard, or the first failure found."""
        hint = max((len(self.shard(index)) for index in there), default=0)
        records = yield from read_records(list(there.values()), hint)
        genuine: dict[int, Record] = {}
        for (index, found), record in zip(there.items(), records, strict=True):
            if isinstance(record, Gone):
                continue
            if isinstance(record, Torn):
                return Failure(found.key, "corrupt", text=str(record))
            if record.fields["kind"] == "failure":
                return Failure.parse(found.key, record.fields)
            if record.fields["manifest"] != manifest.id or record.fields["shard"] != index:
                return Failure(found.key, "corrupt", text="belongs to another manifest")
            genuine[index] = record
        yield from self._take_all(there, genuine)
        return {index: record.id for index, record in genuine.items()}

    def _take_all(self, there: Mapping[int, Found], records: Mapping[int, Record]) -> Flow[None]:
        """Read the results, several pieces at a time."""
        begun: deque[tuple[int, range, Any]] = deque()
        for index in records:
            base, _ = self.layout.span(self.shard(index))
            for piece in self._pieces(self.shard(index)):
                if len(begun) == READ_AHEAD:
                    yield from self._take_next(begun, there, records)
                ticket = yield Begin((self._result_range(there[index].key, piece, base),))
                begun.append((index, piece, ticket))
        while begun:
            yield from self._take_next(begun, there, records)

    def _take_next(
        self, begun: "deque[tuple[int, range, Any]]", there: Mapping[int, Found], records: Mapping[int, Record]
    ) -> Flow[None]:
        index, piece, ticket = begun.popleft()
        (buffer,) = yield Finish(ticket)
        yield from self._take(there[index].key, piece, buffer, records[index], self.shard(index))

    def _result_range(self, key: str, piece: range, base: int) -> Range:
        begin, end = self.layout.span(piece)
        return Range(key, begin - base, end - begin, self.numbers.place(piece))

    def _take(self, key: str, piece: range, buffer: memoryview | None, record: Record, chunks: range) -> Flow[None]:
        """Verify the chunks of a result and write them into the target arrays."""
        base, _ = self.layout.span(chunks)
        offset, _ = self.layout.span(piece)
        placed = self.numbers.place(piece) is not None
        for index in piece:
            chunk = self.layout.chunks[index]
            expected: Any = record.fields["digests"][index - chunks.start]
            wire = buffer[chunk.offset - offset : chunk.offset - offset + chunk.length] if buffer is not None else None
            for _ in range(READS):
                if wire is None or digest(wire) == expected:
                    break
                (wire,) = yield from fetch(self._result_range(key, range(index, index + 1), base))
            if wire is None:
                yield from self.check_not_gone()
            if wire is None or digest(wire) != expected:
                raise CorruptPart(str(self.place), key, "is damaged")
            if not placed:
                self.numbers.accept(index, wire)

    def check_not_gone(self) -> Flow[None]:
        """Raise if the next round has begun: then the missing objects of this one existed, and were removed.

        A listing may be stale, so this reads the first register of the next round, the same for every replica.
        """
        following = Place(self.place.run, self.place.name, self.place.round + 1)
        (stands,) = yield from fetch(Range(following.manifest(0), 0, 1))
        if stands is not None:
            raise RoundGone(
                str(self.place),
                "the others have gone on, and its results were removed; catch up from the last agreed state",
            )
