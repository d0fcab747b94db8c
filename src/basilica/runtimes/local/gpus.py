"""The machine's GPUs and their allocation: never one twice, first come first served, a gang whole or not at all."""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from basilica.core.spec import Gpus
from basilica.machine.layout import Key
from basilica.ports import Run

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    uuid: str
    model: str
    memory_gb: float


@dataclass(frozen=True, slots=True)
class GpuInventory:
    gpus: tuple[Gpu, ...] = ()

    def matching(self, wish: Gpus) -> list[Gpu]:
        return [gpu for gpu in self.gpus if _fits(gpu, wish)]

    def visible(self, uuids: Collection[str]) -> str:
        """Return the value of CUDA_VISIBLE_DEVICES; indexes, since older frameworks do not read uuids."""
        return ",".join(str(gpu.index) for gpu in self.gpus if gpu.uuid in uuids)


def _fits(gpu: Gpu, wish: Gpus) -> bool:
    model = gpu.model.lower().replace("-", " ")
    wanted = [name.lower().replace("-", " ") for name in wish.models]
    # Drivers report slightly less than the size a model is sold with: 79.6 for an "80 GB" card.
    large_enough = wish.min_memory_gb is None or gpu.memory_gb >= 0.95 * wish.min_memory_gb
    return large_enough and (not wanted or any(name in model for name in wanted))


def parse_inventory(csv: str) -> GpuInventory:
    gpus = []
    for line in csv.splitlines():
        index, uuid, model, mebibytes = (part.strip() for part in line.split(","))
        gpus.append(Gpu(index=int(index), uuid=uuid, model=model, memory_gb=float(mebibytes) / 1024))
    return GpuInventory(tuple(gpus))


async def ask_nvidia_smi() -> GpuInventory:
    """Return the machine's GPUs; none where there is no driver, or its answer is unusable."""
    try:
        process = await asyncio.create_subprocess_exec(
            *QUERY, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except (FileNotFoundError, PermissionError):
        return GpuInventory()
    try:
        output, _ = await asyncio.wait_for(process.communicate(), QUERY_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return GpuInventory()
    if process.returncode != 0:
        return GpuInventory()
    try:
        return parse_inventory(os.fsdecode(output))
    except ValueError:
        return GpuInventory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Attempts of one run that have no GPUs yet."""

    run: Run
    keys: tuple[Key, ...]

    @property
    def wish(self) -> Gpus:
        return self.run.spec.resources.gpus


@dataclass(frozen=True, slots=True)
class Allocation:
    """The outcome of one round: the GPUs that each attempt got, and the notes for those that still wait."""

    granted: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[Key, str] = field(default_factory=dict)


def runs_on_cpu(inventory: GpuInventory, wish: Gpus) -> bool:
    """Return True if a run asks for any GPUs, not for particular ones, and the machine has none."""
    return wish.count > 0 and not wish.demanding and not inventory.gpus


def allocate(inventory: GpuInventory, held: Mapping[Key, Collection[str]], queue: Sequence[Waiting]) -> Allocation:
    """Grant free GPUs to the queued runs, oldest first.

    A run gets GPUs only if at least its `min` ranks then have theirs: half a gang would occupy GPUs and wait. No run
    overtakes: GPUs that a waiting run could use are kept from the runs behind it. A run that asks for GPUs that this
    machine never has blocks no other run.
    """
    taken = {uuid for uuids in held.values() for uuid in uuids}
    free = [gpu for gpu in inventory.gpus if gpu.uuid not in taken]
    granted: dict[Key, tuple[str, ...]] = {}
    notes: dict[Key, str] = {}
    ahead: list[str] = []
    for waiting in sorted(queue, key=lambda w: (w.run.created_at, w.run.instance)):
        wish = waiting.wish
        impossible = _impossible(inventory, waiting)
        if impossible is not None:
            notes |= dict.fromkeys(waiting.keys, impossible)
            continue
        holders = sum(1 for key in held if key.instance == waiting.run.instance)
        usable = [gpu for gpu in free if _fits(gpu, wish)]
        served = min(len(usable) // wish.count, len(waiting.keys))
        if served and holders + served >= min(waiting.run.spec.world.min, holders + len(waiting.keys)):
            for n, key in enumerate(sorted(waiting.keys)[:served]):
                granted[key] = tuple(gpu.uuid for gpu in usable[n * wish.count : (n + 1) * wish.count])
        given = {uuid for key in waiting.keys for uuid in granted.get(key, ())}
        free = [gpu for gpu in free if gpu.uuid not in given]
        left = [key for key in waiting.keys if key not in granted]
        if left:
            in_stock = len(inventory.matching(wish))
            have = sum(1 for gpu in inventory.matching(wish) if gpu.uuid not in taken | given)
            behind = f" behind {ahead[-1]!r}" if ahead else _held_by(held, inventory.matching(wish))
            note = f"waiting for {_gpus(len(left) * wish.count)}{behind} ({have} of {in_stock} free)"
            notes |= dict.fromkeys(left, note)
            ahead.append(waiting.run.spec.name)
            free = [gpu for gpu in free if not _fits(gpu, wish)]
        taken |= given
    return Allocation(granted, notes)


def _held_by(held: Mapping[Key, Collection[str]], gpus: Sequence[Gpu]) -> str:
    """Name the runs that occupy those GPUs."""
    wanted = {gpu.uuid for gpu in gpus}
    runs = sorted({key.instance for key, uuids in held.items() if not wanted.isdisjoint(uuids)})
    return f" held by {', '.join(runs)}" if runs else ""


def _impossible(inventory: GpuInventory, waiting: Waiting) -> str | None:
    """Return why this machine can never satisfy the run; None if it can."""
    wish, world = waiting.wish, waiting.run.spec.world
    matching = len(inventory.matching(wish))
    if matching >= wish.count * world.min:
        return None
    particular = " or ".join(wish.models)
    if wish.min_memory_gb is not None:
        particular += f"{' ' if particular else ''}with at least {wish.min_memory_gb} GB"
    has = _describe(inventory)
    if wish.demanding and not matching:
        return f"asked for GPUs: {particular}; this machine has {has}"
    if matching < wish.count:
        return f"asked for {_gpus(wish.count)} per rank{_of(particular)}; this machine has {has}"
    return (
        f"asked for {_gpus(wish.count)} for each of at least {world.min} ranks{_of(particular)}; this machine has {has}"
    )


def _of(particular: str) -> str:
    return f" ({particular})" if particular else ""


def _describe(inventory: GpuInventory) -> str:
    if not inventory.gpus:
        return "no GPU"
    kinds = [f"{gpu.model} ({gpu.memory_gb:.0f} GB)" for gpu in inventory.gpus]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
