r"""Training quality: the same tokens and global batch with synchronous training and with DiLoCo.

A model of characters learns Python, from the sources that are installed. Synchronous training averages the gradients of
all replicas at each step, which is one step with the batches of all; DiLoCo gives each replica its own batches and
averages every H steps, through the real all-reduce. The loss is that on files that nobody trained on. Each way of
training may have a learning rate of its own (`--lr`, `--diloco-lr`): that of one says nothing of the other's.

    python -m benchmarks diloco-training
    python -m benchmarks.diloco_training --sync-every 250 --outer-lr 0.7 --outer-warmup 0
    python -m benchmarks.diloco_training --device cuda --size large --lr 1e-3 --replicas 4 --sync-every 500 \
        --steps 8000 --begin 3000 --outer-lr 0.7 --outer-warmup 0
"""

import argparse
import math
import multiprocessing
import statistics
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from basilica.diloco import DiLoCo, ObjectStoreAllReduce
from basilica.diloco.plan import Question, plan_for
from benchmarks.harness import Figure

LETTERS = 128
ASCII = bytes(code if code < LETTERS else ord("?") for code in range(256))
HELD_OUT_EVERY = 10
EVALUATION_BATCHES = 16
EVALUATION_BATCH = 512
STEPS, SYNC_EVERY, LR = 4000, 50, 6e-3
OUTER_LR, WARMUP = 1.0, 3.0
"""The outer rate and its warm-up: what is advised for a run that begins at random, as all do here."""


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    context: int
    width: int
    layers: int
    batch: int
    text_bytes: int
    """Enough that no training sees much of it twice."""


SIZES = {"small": Size(6, 24, 0, 32, 20 << 20), "large": Size(128, 256, 4, 32, 150 << 20)}


@dataclass(frozen=True)
class Setting:
    """One training. With `sync_every` None it is synchronous."""

    size: Size
    device: str
    replicas: int
    steps: int
    lr: float
    seed: int
    sync_every: int | None = None
    outer_lr: float = OUTER_LR
    outer_warmup: float = WARMUP
    wire: str | None = None
    uri: str = ""
    first: int = 0
    start: str = ""
    """The file with the model that training begins with at step `first`; without it, a new one."""


# ---- text and model ----------------------------------------------------------------------------------------------


@cache
def texts(size: Size, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Files to train on, and files that nobody trains on."""
    train, held_out = bytearray(), bytearray()
    for number, file in enumerate(_sources()):
        if len(train) >= size.text_bytes:
            break
        (train if number % HELD_OUT_EVERY else held_out).extend(file.read_bytes().translate(ASCII))
    return tuple(torch.frombuffer(text, dtype=torch.uint8).to(device) for text in (train, held_out))  # type: ignore[return-value]


def _sources() -> list[Path]:
    """Python's standard library and all packages that are installed beside it."""
    places = sysconfig.get_paths()
    roots = {Path(places["stdlib"]), Path(places["purelib"])}
    return sorted({file for root in roots for file in root.rglob("*.py") if file.is_file()})


def batch(text: torch.Tensor, size: Size, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(text) - size.context - 1, (count, 1), generator=generator, device=text.device)
    letters = text[starts + torch.arange(size.context + 1, device=text.device)].long()
    return letters[:, :-1], letters[:, 1:]


class Mlp(nn.Module):
    """Two layers over all letters of the context: predicts the letter behind it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 16)
        self.hidden = nn.Linear(16 * size.context, 2 * size.width)
        self.head = nn.Linear(2 * size.width, LETTERS)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.hidden(self.letters(inputs).flatten(1))))
        return nn.functional.cross_entropy(scores, targets[:, -1])


class Transformer(nn.Module):
    """Predicts every next letter."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, size.width), nn.Embedding(size.context, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width,
            size.width // 64,
            4 * size.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context), persistent=False)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.letters(inputs) + self.places.weight
        scores = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


_making = threading.Lock()


def new_model(setting: Setting) -> Mlp | Transformer:
    with _making:  # torch has one source of random numbers for all threads
        torch.manual_seed(setting.seed)
        kind = Transformer if setting.size.layers else Mlp
        return kind(setting.size).to(setting.device)


# ---- training ----------------------------------------------------------------------------------------------------


class Trainer:
    """AdamW with warm-up and a cosine, the same for everybody."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = new_model(setting)
        if setting.start:
            self.model.load_state_dict(torch.load(setting.start, map_location=setting.device, weights_only=True))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.lr)
        self._train, self._held_out = texts(setting.size, setting.device)

    def step(self, step: int, ranks: Sequence[int]) -> None:
        """One step on the batches of these replicas."""
        setting = self.setting
        warmup = max(1, setting.steps // 20)
        share = min(1.0, (step - setting.first + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / setting.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = setting.lr * share
        parts = [self._batch(rank, step) for rank in ranks]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        with torch.autocast("cuda", torch.bfloat16, enabled=setting.device == "cuda"):
            loss = self.model.loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = (self.setting.seed * 1009 + rank) * 1_000_003 + step
        generator = torch.Generator(self.setting.device).manual_seed(seed)
        return batch(self._train, self.setting.size, self.setting.size.batch, generator)

    @torch.no_grad()
    def evaluate(self) -> float:
        generator = torch.Generator(self.setting.device).manual_seed(0)
        losses = []
        for _ in range(EVALUATION_BATCHES):
            inputs, targets = batch(self._held_out, self.setting.size, EVALUATION_BATCH, generator)
            losses.append(self.model.loss(inputs, targets).item())
        return statistics.mean(losses)


def synchronous(setting: Setting) -> float:
    trainer = Trainer(setting)
    for step in range(setting.first, setting.steps):
        trainer.step(step, range(setting.replicas))
    return trainer.evaluate()


def begin(setting: Setting, first: int, file: str) -> None:
    """Train synchronously for the first steps, and keep the model."""
    trainer = Trainer(setting)
    for step in range(first):
        trainer.step(step, range(setting.replicas))
    torch.save(trainer.model.state_dict(), file)


def replica(setting: Setting, rank: int) -> tuple[float, int]:
    """The loss with DiLoCo, and the bytes that this replica sent and received."""
    assert setting.sync_every is not None
    trainer = Trainer(setting)
    with (
        ObjectStoreAllReduce(setting.uri, rank, setting.replicas, wire=setting.wire, timeout=3600) as allreduce,
        DiLoCo(
            trainer.model,
            trainer.optimizer,
            allreduce,
            setting.sync_every,
            outer_lr=setting.outer_lr,
            outer_warmup=setting.outer_warmup,
            checkpoint_every=0,
        ) as diloco,
    ):
        for step in range(setting.first, setting.steps):
            trainer.step(step, [rank])
            diloco.step(samples=setting.size.batch)
        moved = sum(stats.bytes_up + stats.bytes_down for stats in allreduce.history)
    return (trainer.evaluate() if rank == 0 else 0.0), moved


def begun(settings: Sequence[Setting], first: int, directory: str) -> list[Setting]:
    """The same trainings, from a common beginning."""
    files = [f"{directory}/{number}.pt" for number in range(len(settings))]
    with _workers(settings[0].device, len(settings)) as workers:
        list(workers.map(begin, settings, [first] * len(settings), files))
    return [replace(setting, first=first, start=file) for setting, file in zip(settings, files, strict=True)]


def train_synchronously(settings: Sequence[Setting]) -> list[float]:
    with _workers(settings[0].device, len(settings)) as workers:
        return list(workers.map(synchronous, settings))


def train_with_diloco(settings: Sequence[Setting]) -> list[tuple[float, int]]:
    """All replicas at once: threads that meet in memory, or processes that share an accelerator and a directory."""
    in_threads = settings[0].device == "cpu"
    with tempfile.TemporaryDirectory(dir=None if in_threads else "/dev/shm") as directory:
        root = f"memory://{directory}" if in_threads else f"file://{directory}"
        placed = [replace(setting, uri=f"{root}/{number}") for number, setting in enumerate(settings)]
        tasks = [(setting, rank) for setting in placed for rank in range(setting.replicas)]
        with _workers(settings[0].device, len(tasks)) as workers:
            found = list(workers.map(replica, *zip(*tasks, strict=True)))
    return [result for (_, rank), result in zip(tasks, found, strict=True) if rank == 0]


def _workers(device: str, count: int) -> Executor:
    if device == "cpu":
        return ThreadPoolExecutor(count)
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


# ---- figures -----------------------------------------------------------------------------------------------------


def compare(
    setting: Setting, *, seeds: int, sync_every: int, diloco_lr: float, first: int = 0, directory: str = ""
) -> Iterator[Figure]:
    """`setting` is the synchronous training. All begin with `first` synchronous steps, kept in the directory."""
    settings = [replace(setting, seed=seed) for seed in range(seeds)]
    if first:
        settings = begun(settings, first, directory)
    params = sum(p.numel() for p in new_model(setting).parameters())
    what = f"{setting.replicas} replicas, H {sync_every}"
    reference = train_synchronously(settings)
    yield Figure(f"{what}: synchronous, loss", statistics.mean(reference), "nats")
    for wire, goal in ((None, "within 1 %"), ("int4", "within 2 %")):
        diloco = [replace(s, sync_every=sync_every, lr=diloco_lr, wire=wire) for s in settings]
        found = train_with_diloco(diloco)
        name = f"{what}: DiLoCo {wire or 'fp32'}"
        yield Figure(f"{name}, loss", statistics.mean(loss for loss, _ in found), "nats")
        ratios = [loss / before for (loss, _), before in zip(found, reference, strict=True)]
        yield Figure(f"{name}, loss above synchronous", 100 * (statistics.mean(ratios) - 1), "%", goal)
        yield Figure(f"{name}, the worst of {seeds} seeds", 100 * (max(ratios) - 1), "%")
        question = Question(params=params, replicas=setting.replicas, link=1e9, step_seconds=1)
        planned = plan_for(question, sync_every=sync_every, fragments=1, wire=wire or "fp32").less_communication
        gradients = (setting.steps - first) * 4 * 4 * params * (setting.replicas - 1) / setting.replicas
        yield Figure(f"{name}, less communication", gradients / found[0][1], "times", f"{planned:.0f} planned")


def run() -> Iterator[Figure]:
    torch.set_num_threads(1)
    for replicas in (4, 8):
        setting = Setting(SIZES["small"], "cpu", replicas, STEPS, LR, 0)
        yield from compare(setting, seeds=3, sync_every=SYNC_EVERY, diloco_lr=LR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sync-every", type=int, default=SYNC_EVERY)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--diloco-lr", type=float, help="if it is another one with DiLoCo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--outer-lr", type=float, default=OUTER_LR)
    parser.add_argument("--outer-warmup", type=float, default=WARMUP)
    parser.add_argument("--begin", type=int, default=0, help="synchronous steps before the comparison")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for replicas in given.replicas:
        setting = Setting(
            SIZES[given.size],
            given.device,
            replicas,
            given.steps,
            given.lr,
            0,
            outer_lr=given.outer_lr,
            outer_warmup=given.outer_warmup,
        )
        other = given.diloco_lr or given.lr
        with tempfile.TemporaryDirectory() as directory:
            for figure in compare(
                setting,
                seeds=given.seeds,
                sync_every=given.sync_every,
                diloco_lr=other,
                first=given.begin,
                directory=directory,
            ):
                print(figure, flush=True)


if __name__ == "__main__":
    main()
