"""The choice of a snapshot: the newest complete step, from copies of one start of the gang."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from basilica.progress.choice import Copy, Tier, choose, complete_steps, plan_transfers
from basilica.progress.memory import MemorySlots, copies_in
from tests.progress.snapshots import header, save


def copy(tier: Tier = Tier.MEMORY, host: str = "h", path: str = "", **given: Any) -> Copy:
    return Copy(header(**given), tier, host, path or f"{given}")


def sharded(step: int, ranks: range, world: int = 4, line: str = "a", tier: Tier = Tier.MEMORY) -> list[Copy]:
    return [copy(tier, step=step, rank=rank, world=world, line=line, sharded=True) for rank in ranks]


def test_a_sharded_step_needs_every_rank() -> None:
    copies = sharded(10, range(4)) + sharded(11, range(3))
    choice = choose(copies)
    assert choice is not None
    assert choice.step == 10


def test_shards_of_two_starts_are_never_mixed() -> None:
    copies = sharded(10, range(4)) + sharded(11, range(2), line="a") + sharded(11, range(2, 4), line="b")
    choice = choose(copies)
    assert choice is not None
    assert choice.step == 10


def test_one_keeper_restores_a_replicated_step() -> None:
    lonely = choose([copy(step=5, rank=2, world=4)])
    assert lonely is not None
    assert lonely.own_file(0) == 2
    assert choose([copy(step=5, rank=2, world=4, keeper=False)]) is None


def test_the_snapshot_before_is_preferred_to_one_that_lacks_the_generators_of_a_rank() -> None:
    whole = [copy(step=4, rank=rank, world=2) for rank in range(2)]
    partial = copy(step=6, before=4, rank=0, world=2)
    preferred = choose([*whole, partial])
    assert preferred is not None
    assert preferred.step == 4
    too_old = choose([*whole, copy(step=6, before=5, rank=0, world=2)])
    assert too_old is not None
    assert too_old.step == 6


def test_tiers_may_be_mixed() -> None:
    copies = sharded(10, range(3)) + sharded(10, range(2, 4), tier=Tier.DISK)
    choice = choose(copies)
    assert choice is not None
    assert choice.tier is Tier.DISK
    assert [choice.copies[rank][0].tier for rank in range(4)] == [Tier.MEMORY] * 3 + [Tier.DISK]


def test_a_refused_copy_is_replaced_by_one_of_the_next_tier_or_by_an_older_step() -> None:
    memory, disk = copy(step=9), copy(Tier.DISK, step=9)
    older = copy(Tier.DISK, step=4)
    first = choose([memory, disk, older])
    second = choose([memory, disk, older], [memory])
    third = choose([memory, disk, older], [memory, disk])
    assert first is not None
    assert second is not None
    assert third is not None
    assert [first.tier, second.tier, third.step] == [Tier.MEMORY, Tier.DISK, 4]
    assert choose([memory], [memory]) is None


def test_a_wanted_step_is_taken_or_none() -> None:
    copies = [copy(step=9), copy(step=4)]
    wanted = choose(copies, step=4)
    assert wanted is not None
    assert wanted.step == 4
    assert choose(copies, step=5) is None


def test_a_later_start_wins_if_a_step_was_taken_twice() -> None:
    copies = [copy(step=9, line="z", sealed_at=1.0), copy(step=9, line="a", sealed_at=2.0)]
    assert [choice.line for choice in complete_steps(copies)] == ["a", "z"]


def test_files_that_a_host_lacks_are_sent_once_to_it() -> None:
    copies = [
        copy(step=9, rank=0, world=2, sharded=True, host="x"),
        copy(step=9, rank=1, world=2, sharded=True, host="y"),
    ]
    choice = choose(copies)
    assert choice is not None
    assert plan_transfers(choice, ["x", "y"], "") == []
    grown = plan_transfers(choice, ["x", "y", "z", "z"], "")
    assert [(each.copy.header.rank, each.source, each.receiver) for each in grown] == [
        (1, 1, 0),
        (0, 0, 1),
        (0, 0, 2),
        (1, 1, 2),
    ]


def test_a_shared_disk_needs_no_transfer() -> None:
    copies = [copy(Tier.DISK, host="", step=9, rank=rank, world=2, sharded=True) for rank in range(2)]
    choice = choose(copies)
    assert choice is not None
    assert plan_transfers(choice, ["x", "y", "z"], "") == []


class Gang:
    """Ranks that take sharded snapshots by the protocol of `Progress`, and are killed anywhere in it."""

    def __init__(self, directory: Path, world: int, line: str) -> None:
        self.directory, self.world, self.line = directory, world, line
        copies = copies_in(str(directory), "h")
        self.restored = choose(copies)
        self.slots = [MemorySlots(str(directory), rank) for rank in range(world)]
        for slots in self.slots:
            if self.restored is not None:
                slots.keep(self.restored.step, self.restored.line)
            slots.forget_others()

    def sealed(self, rank: int) -> int:
        newest = self.slots[rank].newest
        return -1 if newest is None or newest.step is None else newest.step

    def snapshot(self, step: int, whole: set[int], torn: set[int]) -> None:
        """The gang agrees; then these ranks take the whole snapshot, and those are killed in the middle of it."""
        common = min(self.sealed(rank) for rank in range(self.world))
        for rank, slots in enumerate(self.slots):
            if common >= 0:
                slots.keep(common, self.line)
            if rank in whole:
                save(
                    slots,
                    {"x": f"{self.line} {step}"},
                    step=step,
                    rank=rank,
                    world=self.world,
                    line=self.line,
                    sharded=True,
                )
            elif rank in torn:
                slots._next().open(100)

    def close(self) -> None:
        for slots in self.slots:
            slots.close()


@given(data=st.data(), world=st.integers(1, 4))
def test_a_gang_that_is_killed_anywhere_loses_at_most_the_snapshot_that_it_was_taking(
    tmp_path_factory: Any, data: st.DataObject, world: int
) -> None:
    directory = tmp_path_factory.mktemp("memory")
    reached = 0  # the newest step that every rank had sealed
    for life in range(data.draw(st.integers(1, 4), "lives")):
        gang = Gang(directory, world, f"line{life}")
        step = 0 if gang.restored is None else gang.restored.step
        assert step >= reached
        for _ in range(data.draw(st.integers(0, 4), "snapshots")):
            step += 1
            gang.snapshot(step, set(range(world)), set())
            reached = step
        whole = data.draw(st.sets(st.integers(0, world - 1)), "whole")
        gang.snapshot(step + 1, whole, data.draw(st.sets(st.integers(0, world - 1)), "torn") - whole)
        if len(whole) == world:
            reached = step + 1
        gang.close()
        found = choose(copies_in(str(directory), "h"))
        assert (found is None and reached == 0) or (found is not None and found.step == reached)
