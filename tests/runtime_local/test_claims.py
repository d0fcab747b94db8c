"""No rank ever runs twice, whoever starts it, however often, and whenever."""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from basilica.core.errors import RuntimeUnavailable
from basilica.core.seen import SeenRank, Sight
from basilica.ports import Run
from tests.runtime_local.machine import PATIENCE_S, SLEEP, Machine, sh

COUNTED = sh('echo started >> "$BASILICA_CHECKPOINT_DIR/starts-$RANK"; exit 0')


def starts(machine: Machine, run: Run, rank: int = 0) -> int:
    return len((machine.layout.checkpoints(run.instance) / f"starts-{rank}").read_text().splitlines())


async def test_launching_twice_starts_once(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(COUNTED)
        await asyncio.gather(*(machine.launch(run) for _ in range(5)))
        await machine.until_ended(run)
        await machine.launch(run)
        assert starts(machine, run) == 1


async def test_of_many_control_planes_at_a_time_one_starts_the_rank(machine: Machine) -> None:
    """Not allowed, and survived: the claim is on disk, not in anybody's memory."""
    run = machine.run(COUNTED)
    others = [Machine(machine.state_dir) for _ in range(4)]
    for other in others:
        other.mark = machine.mark
    async with asyncio.TaskGroup() as group:
        for other in others:
            group.create_task(_launch_once(other, run))
    assert [starts(machine, run, rank) for rank in range(4)] == [1, 1, 1, 1]


async def _launch_once(machine: Machine, run: Run) -> None:
    async with machine.control_plane() as runtime:
        await machine.launch(run, 0, 1, 2, 3)
        while sum(seen.sight is Sight.ENDED for seen in (await runtime.observe(run)).ranks) < 4:
            await machine.launch(run, 0, 1, 2, 3)
            await asyncio.sleep(0.005)  # the wake-ups go to only one of the four


async def test_a_new_attempt_waits_for_the_end_of_the_old_one(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(SLEEP)
        await machine.launch(run)
        await machine.until_running(run)
        await machine.launch(run, attempt=2)
        assert await machine.seen(run, attempt=2) is None
        assert machine.ranks_become(1)
        await machine.stop(run)
        await machine.until_ended(run)
        await machine.launch(run, attempt=2)
        await machine.until_running(run, attempt=2)
        first = await machine.seen(run, attempt=1)
        assert first is not None
        assert first.sight is Sight.ENDED
        await machine.stop(run, attempt=2)
        await machine.until_ended(run, attempt=2)


async def test_an_old_attempt_does_not_start_after_a_newer_one(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(COUNTED)
        await machine.launch(run, attempt=2)
        await machine.until_ended(run, attempt=2)
        await machine.launch(run, attempt=1)
        assert await machine.seen(run, attempt=1) is None
    async with machine.control_plane() as runtime:  # nor if a late fork server is asked behind the table's back
        runtime._table.add(run.instance)
        await machine.launch(run, attempt=1)
        await machine.until_ended(run, attempt=2)
    assert starts(machine, run) == 1


async def test_two_attempts_never_run_side_by_side(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(SLEEP)
        await machine.launch(run)
        await machine.until_running(run)
        adopted = runtime._table.of(run.instance).copy()
        runtime._table.of(run.instance).clear()  # as if the first had been claimed behind our back
        await machine.launch(run, attempt=2)
        await machine.until_running(run, attempt=1)  # the failed claim made it look again
        assert await machine.seen(run, attempt=2) is None
        assert machine.ranks_become(1)
        for attempt in adopted.values():
            attempt.unwatch()
        await machine.stop(run)
        await machine.until_ended(run)


async def _launch_until(machine: Machine, run: Run, sight: Sight) -> SeenRank:
    """As the controller does: a supervisor's end may be seen before what it had to say, and the next try hears that."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            machine.woken.clear()
            seen = await machine.seen(run)
            if seen is None:
                await machine.launch(run)
            elif seen.sight is sight:
                return seen
            else:
                await machine.woken.wait()


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """A mount of the directory on itself; without the right to make one, there is nothing to test."""
    if subprocess.run(["mount", "--bind", directory, directory], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


async def test_something_in_the_place_of_a_ranks_directory_is_put_aside(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(COUNTED)
        rank = machine.layout.rank(run.instance, 0)
        rank.parent.mkdir(parents=True)
        rank.write_text("in the way")
        assert (await machine.outcome(run)).exit_code == 0


async def test_an_attempt_that_cannot_be_claimed_says_why_and_is_tried_again(machine: Machine) -> None:
    """The file system takes no record for a while: it is read-only."""
    async with machine.control_plane():
        run = machine.run(COUNTED)
        rank = machine.layout.rank(run.instance, 0)
        rank.mkdir(parents=True)
        with read_only(rank):
            seen = await _launch_until(machine, run, Sight.QUEUED)
            assert re.fullmatch(r"it cannot be started now, .* again in .* s: Read-only file system", seen.note)
        seen = await _launch_until(machine, run, Sight.ENDED)
        assert seen.ended is not None
        assert seen.ended.exit_code == 0


async def test_a_removed_run_leaves_nothing_and_may_not_be_removed_alive(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(SLEEP)
        await machine.launch(run)
        await machine.until_running(run)
        with pytest.raises(RuntimeUnavailable, match="has not ended yet"):
            await runtime.remove(run)
        cgroups = machine.record(run).claim.cgroups
        await machine.stop(run)
        await machine.until_ended(run)
        await runtime.remove(run)
        await runtime.remove(run)
        assert (await runtime.observe(run)).ranks == ()
        assert machine.layout.instances() == []
    assert machine.nothing_left()
    assert not any(map(os.path.exists, cgroups))


async def test_what_was_being_removed_when_the_server_died_is_gone_with_the_next(machine: Machine) -> None:
    left = machine.layout.removing / "train-x" / "rank-0"
    left.mkdir(parents=True)
    (left / "1.log").write_text("half removed")
    async with machine.control_plane():
        assert not machine.layout.removing.exists()
