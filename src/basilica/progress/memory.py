"""The snapshots of one rank in the memory of its host: two slots in turn, of which one is always whole.

The directory belongs to the run and lives in a memory file system: what is in it survives the death of any process.
The slot of the newest step that the whole gang has sealed is never overwritten.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from basilica.progress.choice import Copy, Tier
from basilica.progress.snapshot_file import (
    BEST,
    CHECKSUMS,
    HEADER_BYTES,
    PIECE_BYTES,
    Entry,
    Header,
    Slot,
    aligned,
    checksum_of,
    encode_manifest,
    header_of,
)
from basilica.progress.state import Array, State

PEER_SUFFIX = ".peer"


class MemorySlots:
    def __init__(self, directory: str, rank: int) -> None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._slots = [Slot(f"{directory}/{rank}.{number}") for number in (0, 1)]
        self._kept: Slot | None = None
        self._reading: Slot | None = None
        self._free = threading.Condition()

    @property
    def newest(self) -> Slot | None:
        """Return the slot with the newest snapshot that this process has sealed."""
        sealed = [slot for slot in self._slots if slot.step is not None]
        return max(sealed, key=lambda slot: slot.step or 0, default=None)

    def keep(self, step: int, line: str) -> None:
        """Never overwrite this snapshot until `keep` names another one: the gang goes back to it if it fails now."""
        self._kept = next((slot for slot in self._slots if (slot.step, slot.line) == (step, line)), self._kept)

    def forget_others(self) -> None:
        """Take snapshots of earlier starts of the gang for older than those of this one, whatever their steps."""
        for slot in self._slots:
            if slot is not self._kept:
                slot.step = slot.line = None

    @property
    def is_free(self) -> bool:
        """Return whether the slot that is written next is not being read."""
        return self._next() is not self._reading

    def write(self, state: State, *, header: Callable[[int, tuple[int, int], str], Header], keeper: bool) -> Slot:
        """Copy the state into the next slot, and seal it."""
        slot = self._next()
        with self._free:
            self._free.wait_for(lambda: self._reading is not slot)
        placed, size = _place(state, keeper)
        memory = slot.open(size)
        entries = [entry if entry.at is None else _copy(array, entry, memory) for array, entry in placed]
        manifest = encode_manifest(entries, state.skeleton)
        end = size + len(manifest)
        memory = slot.grow(end)
        memory[size:end] = manifest
        slot.seal(header(end, (size, len(manifest)), checksum_of(manifest)))
        return slot

    def read_newest(self) -> "Reading | None":
        """Return the newest snapshot as a context in which it is not overwritten; None if there is none."""
        slot = self.newest
        return None if slot is None else Reading(self, slot)

    def _next(self) -> Slot:
        others = [slot for slot in self._slots if slot is not self._kept]
        return min(others, key=lambda slot: -1 if slot.step is None else slot.step)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class Reading:
    """A snapshot that is being copied to another tier; `path` is its file."""

    def __init__(self, slots: MemorySlots, slot: Slot) -> None:
        assert slot.step is not None
        self._slots, self._slot = slots, slot
        self.path, self.step = slot.path, slot.step
        slots._reading = slot

    def done(self) -> None:
        with self._slots._free:
            self._slots._reading = None
            self._slots._free.notify_all()


def _place(state: State, keeper: bool) -> tuple[list[tuple[Array, Entry]], int]:
    """Return each array with its entry, and the end of the last one."""
    placed, at = [], HEADER_BYTES
    for array in state.arrays:
        size = _size(array.value)
        piece = array.piece
        mine = keeper or not array.shared
        placed.append(
            (
                array,
                Entry(
                    name=array.name,
                    dtype=array.dtype,
                    shape=piece.shape,
                    whole=piece.whole,
                    offsets=piece.offsets,
                    size=size,
                    at=at if mine else None,
                ),
            )
        )
        at = aligned(at + size) if mine else at
    return placed, at


def _size(value: Any) -> int:
    return int(value.nbytes)


def _copy(array: Array, entry: Entry, memory: memoryview) -> Entry:
    """Copy the array into its place, and take its checksum piece by piece while it is in the cache."""
    assert entry.at is not None
    taken = CHECKSUMS[BEST]()
    source = host_bytes(array.value)
    target = memory[entry.at : entry.at + entry.size]
    for begin in range(0, entry.size, PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        piece[:] = source[begin : begin + PIECE_BYTES]
        taken.update(piece)
    return replace(entry, checksum=taken.hexdigest())


def host_bytes(value: Any) -> memoryview:
    """Return the bytes of an array in the memory of the host, without a copy if they are there in one piece."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy())
    flat = value.reshape(-1) if value.flags.c_contiguous else value.copy().reshape(-1)
    return memoryview(flat.view("uint8"))


def copies_in(directory: str, host: str) -> list[Copy]:
    """Return the sealed snapshots in a directory of a host's memory."""
    found = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            header = header_of(entry.path)
            if header is not None:
                tier = Tier.PEER if entry.name.endswith(PEER_SUFFIX) else Tier.MEMORY
                found.append(Copy(header, tier, host, entry.path))
    return found
