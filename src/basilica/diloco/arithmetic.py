"""The numbers of one replica in one round: encoded and hashed for the others, and reduced with theirs.

The module has no notion of objects or of time. Sums follow the order of the ranks and use correctly rounded operations,
so every replica that reduces a chunk gets the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from basilica.diloco.flat import Flat
from basilica.diloco.layout import Chunk, Layout, Segment, lay_out
from basilica.diloco.records import digest
from basilica.diloco.wire import BLOCK, QUANTIZED, Codec, codec, is_state, storage, value_type, wire_of

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


@dataclass
class Residuals:
    """The quantization errors of this replica so far, by chunk: of the parts it sent, and of the means it made."""

    sent: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    made: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def followed_by(self, later: "Residuals") -> "Residuals":
        return Residuals({**self.sent, **later.sent}, {**self.made, **later.made})


def as_bytes(array: Array) -> memoryview:
    """The memory of a contiguous array."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]  # arrays are buffers, which their stubs hide


class Numbers:
    """The arrays of one round: `mine` go out, `target` receives the mean. Both are one-dimensional and contiguous."""

    def __init__(
        self,
        kinds: Sequence[str],
        mine: Sequence[Array],
        target: Sequence[Array],
        *,
        wire: str | None = None,
        residuals: Residuals | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        order = list(dict.fromkeys(kinds))
        self._mine = [Flat([a for a, k in zip(mine, kinds, strict=True) if k == kind]) for kind in order]
        self._target = [Flat([a for a, k in zip(target, kinds, strict=True) if k == kind]) for kind in order]
        segments = [
            Segment(kind, wire_of(kind, wire), flat.count, storage(kind).itemsize)
            for kind, flat in zip(order, self._mine, strict=True)
        ]
        self._codecs: list[Codec] = [codec(segment.kind, segment.wire) for segment in segments]
        self.layout: Layout = lay_out(
            segments,
            [c.wire_bytes for c in self._codecs],
            block=BLOCK if chunk_bytes is None else 1,
            chunk_bytes=chunk_bytes,
        )
        self._before = residuals
        self._after = Residuals()
        self._encoded: dict[int, Bytes] = {}
        self._digests: dict[int, str] = {}
        self._made: dict[int, Bytes] = {}
        self._sums: dict[int, Array] = {}

    # Output.

    def wire(self, index: int) -> memoryview:
        """Return my chunk in wire form: a view of the array itself, if the bytes are the same."""
        chunk = self.layout.chunks[index]
        encoded = self._encoded.get(index)
        if encoded is None:
            kept = self._mine[chunk.segment].read(chunk.start, chunk.stop)
            if self._codecs[chunk.segment].plain and kept.nbytes == chunk.length and kept.dtype.kind not in "iu":
                return as_bytes(kept)
            encoded = self._encode(index, chunk, kept)
        return as_bytes(encoded)

    def digest(self, index: int) -> str:
        """Return the checksum of my chunk."""
        known = self._digests.get(index)
        if known is None:
            known = self._digests[index] = digest(self.wire(index))
        return known

    def _encode(self, index: int, chunk: Chunk, kept: Array) -> Bytes:
        encoded = np.zeros(chunk.length, np.uint8)
        self._codecs[chunk.segment].encode(kept, encoded, self._residual("sent", index, chunk))
        # Encoding takes the residual into account, so it must not happen twice.
        self._encoded[index] = encoded
        return encoded

    def residuals(self, *, counted: bool) -> Residuals | None:
        """Return the residuals for the next round; those of a part that was not counted are dropped."""
        if self._before is None:
            return None
        return self._before.followed_by(self._after if counted else Residuals(made=self._after.made))

    def _residual(self, which: str, index: int, chunk: Chunk) -> NDArray[np.float32] | None:
        """Return a copy of the previous round's residual, for this round to overwrite; every attempt starts from it."""
        if self._before is None or self.layout.segments[chunk.segment].wire not in QUANTIZED.values():
            return None
        count = chunk.stop - chunk.start
        before: NDArray[np.float32] | None = getattr(self._before, which).get(index)
        left = before.copy() if before is not None and len(before) == count else np.zeros(count, np.float32)
        getattr(self._after, which)[index] = left
        return left

    # Reduction.

    def reduce(self, index: int, wires: Sequence[memoryview], weights: Sequence[float]) -> str:
        """Compute the mean of a chunk from the parts in rank order; return the checksum of its wire form."""
        chunk = self.layout.chunks[index]
        how = self._codecs[chunk.segment]
        target = self._target[chunk.segment]
        kind = self.layout.segments[chunk.segment].kind
        count = chunk.stop - chunk.start
        place = target.view(chunk.start, chunk.stop) if how.plain and storage(kind) == value_type(kind) else None
        mean = self._sum_of(chunk) if place is None else place
        values = (how.values(np.frombuffer(wire, np.uint8), count) for wire in wires)
        (_blend if is_state(kind) else _mean)(mean, values, weights)
        if place is not None and place.nbytes == chunk.length:
            return digest(as_bytes(place))
        made = np.zeros(chunk.length, np.uint8)
        how.seal(mean, made, self._residual("made", index, chunk))
        self._made[index] = made
        self.accept(index, as_bytes(made))
        return digest(as_bytes(made))

    def _sum_of(self, chunk: Chunk) -> Array:
        kind = self.layout.segments[chunk.segment].kind
        count = chunk.stop - chunk.start
        if len(self._sums.get(chunk.segment, ())) < count:
            self._sums[chunk.segment] = np.empty(count, value_type(kind))
        return self._sums[chunk.segment][:count]

    def made(self, chunks: range) -> Iterator[memoryview]:
        """Yield the wire form of the means that were computed here."""
        for index in chunks:
            made = self._made.get(index)
            if made is not None:
                yield as_bytes(made)
            else:
                place = self.place(range(index, index + 1))
                assert place is not None
                yield place

    # Input.

    def place(self, chunks: range) -> memoryview | None:
        """Return the target memory of these chunks, if their wire form can be read into it directly; else None."""
        if not chunks:
            return None
        first, last = self.layout.chunks[chunks[0]], self.layout.chunks[chunks[-1]]
        if first.segment != last.segment or not self._codecs[first.segment].plain:
            return None
        view = self._target[first.segment].view(first.start, last.stop)
        begin, end = self.layout.span(chunks)
        return as_bytes(view) if view is not None and view.nbytes == end - begin else None

    def accept(self, index: int, wire: memoryview) -> None:
        """Decode a chunk of the mean into its place in the target."""
        chunk = self.layout.chunks[index]
        target = self._target[chunk.segment]
        place = target.view(chunk.start, chunk.stop)
        kept = (
            np.empty(chunk.stop - chunk.start, storage(self.layout.segments[chunk.segment].kind))
            if place is None
            else place
        )
        self._codecs[chunk.segment].restore(np.frombuffer(wire, np.uint8), kept)
        if place is None:
            target.write(chunk.start, kept)


def _mean(out: Array, values: Iterator[Array], weights: Sequence[float]) -> None:
    """Compute the weighted mean, summed in the given order. Equal weights are not multiplied; weight 0 is skipped."""
    if len(set(weights)) == 1:
        np.copyto(out, next(values))
        for more in values:
            np.add(out, more, out=out)
        if len(weights) > 1:
            np.divide(out, len(weights), out=out)
        return
    total = sum(weights)
    begun = False
    for numbers, weight in zip(values, weights, strict=True):
        if not weight:
            continue
        share = out.dtype.type(weight / total)
        if begun:
            np.add(out, numbers * share, out=out)
        else:
            np.multiply(numbers, share, out=out)
            begun = True


def _blend(out: Array, values: Iterator[Array], weights: Sequence[float]) -> None:
    """Combine state numbers (see `wire`): the weighted mean of floats, the maximum of integers.

    A mean lies between the minimum and the maximum. Rounding must not move it outside, so that numbers that are equal
    in all replicas stay exactly the same.
    """
    counted = [np.array(numbers) for numbers, weight in zip(values, weights, strict=True) if weight]
    greatest = np.maximum.reduce(counted)
    if out.dtype.kind in "iub":
        np.copyto(out, greatest)
        return
    with np.errstate(invalid="ignore"):  # infinities of both signs have no mean: the result is NaN
        _mean(out, iter(counted), [weight for weight in weights if weight])
    np.clip(out, np.minimum.reduce(counted), greatest, out=out)
