"""The choice of a snapshot to restore: which step is complete, and which copy each rank reads. Pure.

A step is complete in one line (one start of the gang) if the copies that are left hold all of its state. Where ranks
have arrays of their own (`sharded`), a copy of every rank's file is needed. Otherwise the state is replicated, and one
file of a keeper restores the whole gang; what else a rank had, such as its random generators, is restored if there is
a copy of its own file.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from basilica.progress.snapshot_file import Header


class Tier(IntEnum):
    """Where a copy is, the nearest first."""

    MEMORY = 0
    PEER = 1
    DISK = 2
    BUCKET = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Copy:
    """One file that holds one rank's state of one step. `host`: the only host that can read it; "" if all can."""

    header: Header
    tier: Tier
    host: str
    path: str

    def __str__(self) -> str:
        of = f"step {self.header.step} of rank {self.header.rank}"
        return f"the copy of {of} in tier {self.tier.label}" + (f" ({self.path})" if self.path else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """The step to restore, and the copies of each old rank's file, the nearest tier first."""

    step: int
    line: str
    world: int
    sharded: bool
    layout: str
    planned: bool
    before: int
    copies: Mapping[int, tuple[Copy, ...]]

    @property
    def tier(self) -> Tier:
        """The farthest tier that is needed."""
        return max(copies[0].tier for copies in self.copies.values())

    @property
    def has_every_rank(self) -> bool:
        return len(self.copies) == self.world

    def own_file(self, rank: int) -> int:
        """Return the old rank whose file this rank starts from: its own, or else the lowest one that there is."""
        return rank if rank in self.copies else min(self.copies)

    def keepers(self) -> list[int]:
        """Return the old ranks whose files hold what all ranks share, the nearest first."""
        found = [rank for rank, copies in self.copies.items() if copies[0].header.keeper]
        return sorted(found, key=lambda rank: (self.copies[rank][0].tier, rank))

    def files_of(self, rank: int, world: int, layout: str) -> list[int]:
        """Return the old ranks whose files this rank of the new world has to read."""
        if self.sharded and (world != self.world or layout != self.layout):
            return sorted(self.copies)
        own = self.own_file(rank)
        if self.copies[own][0].header.keeper:
            return [own]
        return [own, *self.keepers()[:1]]


def complete_steps(copies: Iterable[Copy]) -> list[Choice]:
    """Return every complete step, the newest first; of a step that was taken twice, the later line first."""
    by_line: defaultdict[tuple[int, str, int], defaultdict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        header = copy.header
        by_line[header.step, header.line, header.world][header.rank].append(copy)
    found = []
    for (step, line, world), files in by_line.items():
        ordered = {rank: tuple(sorted(files[rank], key=lambda copy: (copy.tier, copy.path))) for rank in sorted(files)}
        headers = [copies[0].header for copies in ordered.values()]
        sharded = any(header.sharded for header in headers)
        if len(ordered) < world if sharded else not any(header.keeper for header in headers):
            continue
        latest = max(header.sealed_at for header in headers)
        choice = Choice(
            step=step,
            line=line,
            world=world,
            sharded=sharded,
            layout=headers[0].layout,
            planned=all(header.planned for header in headers),
            before=min(header.before for header in headers),
            copies=ordered,
        )
        found.append((step, latest, line, choice))
    return [choice for *_, choice in sorted(found, key=lambda each: each[:3], reverse=True)]


def choose(copies: Iterable[Copy], refused: Iterable[Copy] = (), step: int | None = None) -> Choice | None:
    """Return the newest complete step that needs no refused copy; with `step`, that step or none.

    A replicated step is complete without the files of some ranks, but their random generators are lost with these. The
    snapshot just before it is preferred if it has them all: the training is then the same as without the failure.
    """
    bad = set(refused)
    found = complete_steps(copy for copy in copies if copy not in bad)
    wanted = [choice for choice in found if step is None or choice.step == step]
    if not wanted:
        return None
    newest = wanted[0]
    if newest.has_every_rank:
        return newest
    return next((choice for choice in wanted if choice.has_every_rank and choice.step >= newest.before), newest)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One file that the rank `source` sends to the rank `receiver`, for all ranks of that rank's host."""

    copy: Copy
    source: int
    receiver: int


def plan_transfers(choice: Choice, hosts: list[str], layout: str) -> list[Transfer]:
    """Return the files that hosts need and do not have, in an order that all ranks agree on."""
    lowest: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        lowest.setdefault(host, rank)
    planned: list[Transfer] = []
    for host, receiver in lowest.items():
        here = [rank for rank, of in enumerate(hosts) if of == host]
        needed = sorted({file for rank in here for file in choice.files_of(rank, len(hosts), layout)})
        for file in needed:
            if any(copy.host in ("", host) for copy in choice.copies[file]):
                continue
            copy = next((each for each in choice.copies[file] if each.host in lowest), None)
            if copy is not None:
                planned.append(Transfer(copy, lowest[copy.host], receiver))
    return planned
