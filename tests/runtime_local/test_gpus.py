"""GPUs: never one twice, first come first served, a gang whole or not at all."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.core.seen import Sight
from basilica.core.spec import Exec, Gpus, Resources
from basilica.core.world import WorldSize
from basilica.machine.layout import Key
from basilica.ports import Run
from basilica.runtimes.local.gpus import Gpu, GpuInventory, Waiting, allocate, parse_inventory
from tests.runtime_local.machine import Machine, sh

HOLD = Exec(("sleep", "1000"))


def inventory(count: int, model: str = "NVIDIA H100 80GB HBM3", memory_gb: float = 79.6) -> GpuInventory:
    return GpuInventory(tuple(Gpu(index=n, uuid=f"GPU-{n}", model=model, memory_gb=memory_gb) for n in range(count)))


def gang(machine: Machine, name: str, created_at: float, gpus: Gpus, world: WorldSize) -> Run:
    return machine.run(HOLD, name=name, world=world, resources=Resources(gpus=gpus), created_at=created_at)


async def test_each_rank_has_its_own_and_a_rank_without_sees_none(machine: Machine) -> None:
    show = sh("echo ${CUDA_VISIBLE_DEVICES-unset}")
    async with machine.control_plane(gpus=inventory(4)):
        two = machine.run(show, name="two", resources=Resources(gpus=Gpus(2)))
        none = machine.run(show, name="none")
        await machine.launch(two, 0, 1)
        shown = [(await machine.until_ended(two, rank)).log_tail for rank in (0, 1)]
        assert shown == [("0,1",), ("2,3",)]
        assert (await machine.outcome(none)).log_tail == ("",)


async def test_whoever_comes_late_waits_and_is_told_behind_whom(machine: Machine) -> None:
    async with machine.control_plane(gpus=inventory(4)) as runtime:
        first = gang(machine, "llama", 1.0, Gpus(1), WorldSize(3, 3, 3))
        second = gang(machine, "bert", 2.0, Gpus(2), WorldSize(1, 2, 2))
        third = gang(machine, "tiny", 3.0, Gpus(1), WorldSize(1, 1, 1))
        await machine.launch(first, 0, 1, 2)
        await machine.launch(second, 0, 1)
        await machine.launch(third, 0)
        for rank in range(3):
            running = await machine.until_running(first, rank)
            assert running.gpus == 1
        waiting = await machine.seen(second, 0)
        behind = await machine.seen(third, 0)
        assert waiting is not None
        assert behind is not None
        assert (waiting.sight, waiting.note) == (Sight.QUEUED, "waiting for 4 GPUs held by llama-x (1 of 4 free)")
        assert (behind.sight, behind.note) == (Sight.QUEUED, "waiting for 1 GPU behind 'bert' (1 of 4 free)")
        await machine.stop(first, 0)
        await machine.until_running(second, 0)  # two are free: enough for its minimum of one rank
        seen = await machine.seen(second, 1)
        assert seen is not None
        assert seen.sight is Sight.QUEUED
        await machine.stop(first, 1, 2)
        await machine.until_running(second, 1)
        await machine.stop(second, 0)
        await machine.until_running(third, 0)
        await machine.stop(second, 1)
        await machine.stop(third, 0)
        for run in (first, second, third):
            for rank in range(run.spec.world.target):
                await machine.until_ended(run, rank)
        assert (await runtime.observe(first)).warnings == ()


async def test_a_queued_attempt_that_is_stopped_never_starts_and_makes_room(machine: Machine) -> None:
    async with machine.control_plane(gpus=inventory(2)):
        first = gang(machine, "first", 1.0, Gpus(1), WorldSize(1, 1, 1))
        large = gang(machine, "large", 2.0, Gpus(2), WorldSize(1, 1, 1))
        small = gang(machine, "small", 3.0, Gpus(1), WorldSize(1, 1, 1))
        for run in (first, large, small):
            await machine.launch(run)
        await machine.stop(large)
        ended = await machine.until_ended(large)
        assert (ended.reason, ended.exit_code) == ("Cancelled", None)
        await machine.until_running(small)
        await machine.launch(large)
        assert (await machine.until_ended(large)) == ended
        for run in (first, small):
            await machine.stop(run)
            await machine.until_ended(run)


async def test_what_ranks_hold_is_known_after_a_restart(machine: Machine) -> None:
    first = gang(machine, "first", 1.0, Gpus(1), WorldSize(2, 2, 2))
    old = gang(machine, "old", 2.0, Gpus(2), WorldSize(1, 1, 1))
    young = gang(machine, "young", 3.0, Gpus(2), WorldSize(1, 1, 1))
    async with machine.control_plane(gpus=inventory(2)):
        await machine.launch(first, 0, 1)
        for rank in (0, 1):
            await machine.until_running(first, rank)
    async with machine.control_plane(gpus=inventory(2)):
        await machine.launch(young)  # the order in which a new controller asks is not the order of arrival
        await machine.launch(old)
        await machine.until(old, lambda seen: "(0 of 2 free)" in seen.note)
        await machine.stop(first, 0, 1)
        await machine.until_running(old)
        seen = await machine.seen(young)
        assert seen is not None
        assert seen.sight is Sight.QUEUED
        await machine.stop(old)
        await machine.until_running(young)
        await machine.stop(young)
        await machine.until_ended(young)


async def test_after_a_restart_the_oldest_comes_first_whoever_asks_first(machine: Machine) -> None:
    old = gang(machine, "old", 2.0, Gpus(2), WorldSize(1, 1, 1))
    young = gang(machine, "young", 3.0, Gpus(2), WorldSize(1, 1, 1))
    async with machine.control_plane(gpus=inventory(2)):
        await machine.outcome(machine.run(sh("exit 0"), name="earlier"))
    async with machine.control_plane(gpus=inventory(2)):
        await machine.launch(young)
        await machine.launch(old)
        await machine.until_running(old)
        seen = await machine.seen(young)
        assert seen is not None
        assert seen.sight is Sight.QUEUED
        for run in (old, young):
            await machine.stop(run)
            await machine.until_ended(run)


@pytest.mark.parametrize(
    ("wish", "world", "note"),
    [
        (
            Gpus(1, models=("B200",)),
            WorldSize(1, 1, 1),
            "asked for GPUs: B200; this machine has 2 x NVIDIA H100 80GB HBM3 (80 GB)",
        ),
        (
            Gpus(1, min_memory_gb=100),
            WorldSize(1, 1, 1),
            "asked for GPUs: with at least 100 GB; this machine has 2 x NVIDIA H100 80GB HBM3 (80 GB)",
        ),
        (
            Gpus(4),
            WorldSize(1, 1, 1),
            "asked for 4 GPUs per rank; this machine has 2 x NVIDIA H100 80GB HBM3 (80 GB)",
        ),
        (
            Gpus(1),
            WorldSize(3, 3, 3),
            "asked for 1 GPU for each of at least 3 ranks; this machine has 2 x NVIDIA H100 80GB HBM3 (80 GB)",
        ),
    ],
)
async def test_what_this_machine_never_has_is_said_and_keeps_nobody_waiting(
    machine: Machine, wish: Gpus, world: WorldSize, note: str
) -> None:
    async with machine.control_plane(gpus=inventory(2)):
        wishful = gang(machine, "wishful", 1.0, wish, world)
        modest = gang(machine, "modest", 2.0, Gpus(1, models=("h100",), min_memory_gb=80), WorldSize(1, 2, 2))
        await machine.launch(wishful, *range(world.target))
        await machine.launch(modest, 0, 1)
        seen = await machine.seen(wishful)
        assert seen is not None
        assert (seen.sight, seen.note) == (Sight.QUEUED, note)
        for rank in (0, 1):
            await machine.until_running(modest, rank)
        await machine.stop(modest, 0, 1)
        await machine.stop(wishful, *range(world.target))
        await asyncio.gather(*(machine.until_ended(modest, rank) for rank in (0, 1)))


async def test_a_demand_on_a_machine_without_gpus_waits_and_says_so(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = gang(machine, "run", 1.0, Gpus(1, models=("A100",)), WorldSize(1, 1, 1))
        await machine.launch(run)
        seen = await machine.seen(run)
        assert seen is not None
        assert (seen.sight, seen.note) == (Sight.QUEUED, "asked for GPUs: A100; this machine has no GPU")
        assert (await runtime.observe(run)).warnings == ()
        await machine.stop(run)


def test_the_drivers_list_is_read() -> None:
    csv = "0, GPU-aa, NVIDIA A100-SXM4-80GB, 81920\n1, GPU-bb, NVIDIA A100-SXM4-80GB, 81920\n"
    assert parse_inventory(csv).gpus[1] == Gpu(index=1, uuid="GPU-bb", model="NVIDIA A100-SXM4-80GB", memory_gb=80.0)
    assert len(parse_inventory(csv).matching(Gpus(1, models=("a100-80GB", "A100")))) == 2


@st.composite
def lines_of_runs(draw: st.DrawFn) -> tuple[GpuInventory, dict[Key, tuple[str, ...]], list[Waiting]]:
    stock = inventory(draw(st.integers(0, 8)))
    held: dict[Key, tuple[str, ...]] = {}
    free = [gpu.uuid for gpu in stock.gpus]
    machine = Machine.__new__(Machine)
    machine.mark = ""
    queue = []
    for n in range(draw(st.integers(1, 4))):
        count, low = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        high = low + draw(st.integers(0, 2))
        run = gang(machine, f"run-{n}", float(draw(st.integers(0, 3))), Gpus(count), WorldSize(low, high, high))
        holders = draw(st.integers(0, min(high, len(free) // count)))
        for rank in range(holders):
            held[Key(run.instance, rank, 1)] = tuple(free[:count])
            del free[:count]
        if holders < high:
            queue.append(Waiting(run=run, keys=tuple(Key(run.instance, rank, 1) for rank in range(holders, high))))
    return stock, held, queue


@given(lines_of_runs())
def test_no_gpu_twice_no_half_gang_and_nobody_overtakes(
    case: tuple[GpuInventory, dict[Key, tuple[str, ...]], list[Waiting]],
) -> None:
    stock, held, queue = case
    result = allocate(stock, held, queue)
    given_out = [uuid for uuids in (*held.values(), *result.granted.values()) for uuid in uuids]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= {gpu.uuid for gpu in stock.gpus}
    asked = {key for waiting in queue for key in waiting.keys}
    assert result.granted.keys() | result.notes.keys() == asked
    assert not result.granted.keys() & result.notes.keys()
    somebody_waits = False
    for waiting in sorted(queue, key=lambda w: (w.run.created_at, w.run.instance)):
        got = [key for key in waiting.keys if key in result.granted]
        holders = [key for key in held if key.instance == waiting.run.instance]
        assert all(len(result.granted[key]) == waiting.wish.count for key in got)
        assert not (got and somebody_waits)
        if got:
            assert len(got) + len(holders) >= min(waiting.run.spec.world.min, len(holders) + len(waiting.keys))
        never = len(stock.gpus) < waiting.wish.count * waiting.run.spec.world.min
        somebody_waits = somebody_waits or (len(got) < len(waiting.keys) and not never)
