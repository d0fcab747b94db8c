"""The restore of a gang: the newest complete step, checked, from whichever copies are left.

All ranks gather what each of them can see, choose by the same pure rule, fetch files that only another host has, and
read. A rank that finds a copy damaged names it; all ranks then exclude it and choose again.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from basilica.progress import notes
from basilica.progress.choice import Choice, Copy, choose, complete_steps, plan_transfers
from basilica.progress.gang import Gang
from basilica.progress.snapshot_file import Corrupt, Entry, Snapshot
from basilica.progress.state import Piece, overlap, piece_of, template_for, templates_of
from basilica.progress.state import load as load_skeleton


@dataclass(frozen=True, slots=True)
class Restored:
    """The state that a rank restores; `own`: the file was written by this very rank, so its generators are right."""

    choice: Choice
    content: Mapping[str, Any]
    own: bool


@dataclass(frozen=True, slots=True)
class Places:
    """What a rank can see: its host, its directory in the host's memory, and the copies.

    `earlier`: those of the run that this one goes on from. They count until any rank sees a copy of this run.
    """

    host: str
    memory: str
    copies: tuple[Copy, ...]
    earlier: tuple[Copy, ...] = ()


def find(gang: Gang, places: Places, parts: Mapping[str, Any], layout: str, step: int | None) -> Restored | None:
    """Return the newest complete state that every rank could read; None for a fresh start. All ranks call it."""
    seen: list[Places] = gang.gather(places)
    copies = list(dict.fromkeys(copy for each in seen for copy in each.copies))
    if copies:
        step = None
    else:
        copies = list(dict.fromkeys(copy for each in seen for copy in each.earlier))
    hosts = [each.host for each in seen]
    refused: set[Copy] = set()
    while True:
        choice = choose(copies, refused, step)
        if choice is None:
            if step is not None:
                steps = ", ".join(str(each.step) for each in complete_steps(copies)) or "none"
                raise RuntimeError(f"there is no complete snapshot of step {step} to go on from; complete: {steps}")
            return None
        fetched = _fetch(gang, choice, hosts, places, layout)
        found, problem, bad = None, "", None
        try:
            found = _Reader(choice, gang, places.host, fetched, layout).read(parts)
        except _Damaged as error:
            problem, bad = str(error), error.copy
        except Exception as error:  # noqa: BLE001 (another rank must not wait for this one's answer)
            problem = f"{type(error).__name__}: {error}"
        answers = gang.gather((problem, bad))
        for path in fetched.values():
            with suppress(OSError):
                os.unlink(path)
        if not any(problem for problem, _ in answers):
            return found
        fatal = next((problem for problem, bad in answers if problem and bad is None), None)
        if fatal is not None:
            raise RuntimeError(f"step {choice.step} cannot be restored: {fatal}")
        for rank, (text, each) in enumerate(answers):
            if each is not None and each not in refused:
                refused.add(each)
                if rank == (0 if gang.apart else gang.rank):
                    notes.refused(text)


def _fetch(gang: Gang, choice: Choice, hosts: list[str], places: Places, layout: str) -> dict[int, str]:
    """Exchange the files that hosts need and do not have; return this host's by old rank."""
    fetched: dict[int, str] = {}
    if gang.world == 1:
        return fetched
    for transfer in plan_transfers(choice, hosts, layout):
        header = transfer.copy.header
        path = f"{places.memory}/.fetched.{header.rank}"
        if gang.rank == transfer.source:
            with open(transfer.copy.path, "rb") as file:
                gang.send(bytearray(file.read(header.bytes).ljust(header.bytes, b"\0")), transfer.receiver)
        elif gang.rank == transfer.receiver:
            data = bytearray(header.bytes)
            gang.receive(data, transfer.source)
            with open(path, "wb") as copy:
                copy.write(data)
        if places.host == hosts[transfer.receiver]:
            fetched[header.rank] = path
    gang.gather(None)  # the files are there before another rank of the host reads them
    return fetched


class _Damaged(Exception):
    def __init__(self, text: str, copy: Copy) -> None:
        super().__init__(text)
        self.copy = copy


class _Reader:
    """Reads one rank's state from the files of a choice."""

    def __init__(self, choice: Choice, gang: Gang, host: str, fetched: Mapping[int, str], layout: str) -> None:
        self._choice, self._gang, self._host, self._fetched = choice, gang, host, fetched
        self._rank = gang.rank
        self._files = choice.files_of(self._rank, gang.world, layout)
        self._open: dict[int, tuple[Copy, Snapshot]] = {}

    def read(self, parts: Mapping[str, Any]) -> Restored:
        own = self._choice.own_file(self._rank)
        templates = templates_of(parts)
        try:
            skeleton = self._snapshot(own).manifest.skeleton
            content = load_skeleton(skeleton, lambda name: self._array(name, own, templates))
        finally:
            for _, snapshot in self._open.values():
                snapshot.close()
        return Restored(self._choice, content, own=own == self._rank)

    def _snapshot(self, rank: int) -> Snapshot:
        if rank not in self._open:
            copies = self._choice.copies[rank]
            copy = next((each for each in copies if each.host in ("", self._host)), copies[0])
            path = copy.path if copy.host in ("", self._host) else self._fetched.get(rank, copy.path)
            try:
                self._open[rank] = copy, Snapshot(path)
            except Corrupt as error:
                raise _Damaged(str(error), copy) from None
            if self._open[rank][1].header != copy.header:
                raise _Damaged(f"{path} was overwritten while it was restored", copy)
        return self._open[rank][1]

    def _array(self, name: str, own: int, templates: Mapping[str, Any]) -> Any:
        entry = self._snapshot(own).entries[name]
        template = template_for(name, entry.whole, templates)
        if template is None and entry.shape == entry.whole:
            self._check_replicated(name, entry)
            return _from_bytes(self._bytes(name, own), entry.dtype, entry.shape)
        target = piece_of(template) if template is not None else _whole(entry.whole)
        local = self._assemble(name, entry, target, own)
        if template is None:
            return local
        return sys.modules["torch.distributed.tensor"].DTensor.from_local(
            local.to(template.device),
            template.device_mesh,
            template.placements,
            run_check=False,
            shape=template.shape,
            stride=template.stride(),
        )

    def _assemble(self, name: str, entry: Entry, target: Piece, own: int) -> Any:
        """Put the target piece together from the pieces of all files, this rank's own file first."""
        if (entry.shape, entry.offsets) == (target.shape, target.offsets):
            return _from_bytes(self._bytes(name, own), entry.dtype, entry.shape)
        torch = sys.modules["torch"]
        result = torch.empty(target.shape, dtype=_torch_dtype(entry.dtype))
        seen: set[tuple[int, ...]] = set()
        for rank in self._files:
            other = self._snapshot(rank).entries.get(name)
            if other is None or other.offsets in seen:
                continue
            seen.add(other.offsets)
            where = overlap(target, Piece(other.whole, other.offsets, other.shape))
            if where is not None:
                result[where[0]] = _from_bytes(self._bytes(name, rank), other.dtype, other.shape)[where[1]]
        return result

    def _bytes(self, name: str, rank: int) -> memoryview:
        """Return the bytes of an array from the rank's file, or from a keeper's if all ranks share it."""
        for file in (rank, *self._choice.keepers()):
            snapshot = self._snapshot(file)
            found = snapshot.entries.get(name)
            if found is not None and found.at is not None:
                try:
                    return snapshot.read(name)
                except Corrupt as error:
                    raise _Damaged(str(error), self._open[file][0]) from None
        raise KeyError(f"no file of step {self._choice.step} has {name}")

    def _check_replicated(self, name: str, entry: Entry) -> None:
        """In another world, an array that is no DTensor must have been the same on all ranks."""
        if not self._choice.sharded or self._gang.world == self._choice.world or entry.at is None:
            return
        sums = {found.checksum for rank in self._files if (found := self._snapshot(rank).entries.get(name)) is not None}
        if len(sums) > 1:
            raise ValueError(
                f"{name} differs from rank to rank and is no DTensor: it cannot be restored in a world of"
                f" {self._gang.world} ranks from {self._choice.world}"
            )


def _whole(shape: tuple[int, ...]) -> Piece:
    return Piece(shape, (0,) * len(shape), shape)


def _from_bytes(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array of its own memory: the file is overwritten by a later snapshot."""
    if dtype.startswith("torch."):
        torch = sys.modules["torch"]
        if not len(data):
            return torch.empty(shape, dtype=_torch_dtype(dtype))
        return torch.frombuffer(bytearray(data), dtype=_torch_dtype(dtype)).reshape(shape)
    numpy = sys.modules["numpy"]
    return numpy.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _torch_dtype(name: str) -> Any:
    return getattr(sys.modules["torch"], name.removeprefix("torch."))
