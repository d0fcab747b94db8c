"""The layout of an all-reduce: arrays become segments, segments chunks, and chunks shards.

A segment has all arrays of one kind, one behind the other. A chunk is the unit of hashing, encoding and reduction:
small enough for the processor's cache, and never across two segments. A shard is a run of chunks that one replica
reduces. The layout follows from the arrays' kinds and sizes alone, so all replicas compute the same one independently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

LARGEST_CHUNK = 1 << 20
SMALLEST_CHUNK = 16 << 10
CHUNKS_WANTED = 64
"""Enough that eight or sixteen replicas get shards of about the same size."""
ALIGNMENT = 16
"""Chunks begin at multiples of this, so that every type of number can be computed with where it lies."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` numbers of one kind, and the form in which they travel."""

    kind: str
    wire: str
    count: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Numbers `start` to `stop` of a segment; `length` bytes at `offset` of the wire form of the whole."""

    segment: int
    start: int
    stop: int
    offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    segments: tuple[Segment, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def wire_bytes(self) -> int:
        return self.chunks[-1].offset + self.chunks[-1].length if self.chunks else 0

    @cached_property
    def fingerprint(self) -> tuple[str, ...]:
        """The fingerprint by which two replicas know that they have the same arrays."""
        kinds = (f"{s.count} x {s.kind} as {s.wire}" for s in self.segments)
        return (*kinds, f"{len(self.chunks)} chunks of {self.wire_bytes} bytes")

    def shard(self, index: int, of: int) -> range:
        """The chunks of one of `of` shards. With few chunks some shards are empty."""
        return range(len(self.chunks) * index // of, len(self.chunks) * (index + 1) // of)

    def span(self, chunks: range) -> tuple[int, int]:
        """Return the begin and the end of a run of chunks on the wire."""
        if not chunks:
            return (0, 0)
        last = self.chunks[chunks[-1]]
        return self.chunks[chunks[0]].offset, last.offset + last.length


def lay_out(
    segments: Sequence[Segment],
    wire_bytes: Sequence[Callable[[int], int]],
    *,
    block: int,
    chunk_bytes: int | None = None,
) -> Layout:
    """Cut segments into chunks of a multiple of `block` numbers; `wire_bytes[s](n)`: how long n numbers are there."""
    if chunk_bytes is None:
        total = sum(segment.count * segment.itemsize for segment in segments)
        chunk_bytes = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, total // CHUNKS_WANTED))
    chunks: list[Chunk] = []
    offset = 0
    for index, segment in enumerate(segments):
        step = max(block, chunk_bytes // segment.itemsize // block * block)
        for start in range(0, segment.count, step):
            stop = min(start + step, segment.count)
            length = -(-wire_bytes[index](stop - start) // ALIGNMENT) * ALIGNMENT
            chunks.append(Chunk(index, start, stop, offset, length))
            offset += length
    return Layout(tuple(segments), tuple(chunks))
