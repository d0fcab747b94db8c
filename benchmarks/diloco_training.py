"""Training quality: the same tokens and global batch with synchronous training and with DiLoCo.

A model of characters learns the source of Python's standard library. Synchronous training averages the gradients of all
replicas at each step, which is one step with the batches of all; DiLoCo gives each replica its own batches and averages
every H steps, through the real all-reduce, in memory. The loss is that on files that nobody trained on.

    python -m benchmarks diloco-training
    python -m benchmarks.diloco_training --device cuda --sync-every 500 --steps 10000 --size large
"""

import argparse
import math
import statistics
import sysconfig
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from basilica.diloco import DiLoCo, ObjectStoreAllReduce
from basilica.diloco.plan import Question, plan_for
from benchmarks.harness import Figure

LETTERS = 128
HELD_OUT_EVERY = 10
EVALUATION_BATCHES = 16
EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    context: int
    width: int
    layers: int
    batch: int
    lr: float


SIZES = {"small": Size(16, 64, 0, 16, 3e-3), "large": Size(256, 512, 6, 16, 6e-4)}


@dataclass(frozen=True)
class Setting:
    size: Size
    device: torch.device
    replicas: int
    steps: int
    sync_every: int
    outer_lr: float
    seed: int


# ---- text and model ----------------------------------------------------------------------------------------------


@cache
def texts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Files to train on, and files that nobody trains on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = ["".join(f.read_text("utf-8", "replace") for f in files if f not in held) for held in [files[::10]]]
    parts.append("".join(f.read_text("utf-8", "replace") for f in files[::HELD_OUT_EVERY]))
    train, held_out = (torch.frombuffer(bytearray(p.encode("ascii", "replace")), dtype=torch.uint8) for p in parts)
    return train.to(device), held_out.to(device)


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
            size.width, size.width // 64, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.size.lr)
        self._train, self._held_out = texts(setting.device)

    def step(self, step: int, ranks: Sequence[int]) -> None:
        """One step on the batches of these replicas."""
        setting = self.setting
        warmup = max(1, setting.steps // 20)
        share = min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / setting.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = setting.size.lr * share
        parts = [self._batch(rank, step) for rank in ranks]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        with torch.autocast("cuda", torch.bfloat16, enabled=setting.device.type == "cuda"):
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
    for step in range(setting.steps):
        trainer.step(step, range(setting.replicas))
    return trainer.evaluate()


def with_diloco(setting: Setting, wire: str | None) -> tuple[float, int]:
    """The loss, and the bytes that one replica sent and received."""
    uri = f"memory://{uuid.uuid4().hex}"

    def replica(rank: int) -> tuple[float, int]:
        trainer = Trainer(setting)
        with (
            ObjectStoreAllReduce(uri, rank, setting.replicas, wire=wire, timeout=3600) as allreduce,
            DiLoCo(
                trainer.model,
                trainer.optimizer,
                allreduce,
                setting.sync_every,
                outer_lr=setting.outer_lr,
                checkpoint_every=0,
            ) as diloco,
        ):
            for step in range(setting.steps):
                trainer.step(step, [rank])
                diloco.step(samples=setting.size.batch)
            moved = sum(stats.bytes_up + stats.bytes_down for stats in allreduce.history)
        return trainer.evaluate() if rank == 0 else 0.0, moved

    with ThreadPoolExecutor(setting.replicas) as threads:
        return next(iter(list(threads.map(replica, range(setting.replicas)))))


# ---- figures -----------------------------------------------------------------------------------------------------


def compare(
    size: Size, device: torch.device, replicas: int, steps: int, sync_every: int, outer_lr: float, seeds: int
) -> Iterator[Figure]:
    settings = [Setting(size, device, replicas, steps, sync_every, outer_lr, seed) for seed in range(seeds)]
    model = new_model(settings[0])
    params = sum(p.numel() for p in model.parameters())
    what = f"{replicas} replicas, H {sync_every}"
    reference = [synchronous(setting) for setting in settings]
    yield Figure(f"{what}: synchronous, loss", statistics.mean(reference), "nats")
    for wire, goal in ((None, "within 1 %"), ("int4", "within 2 %")):
        found = [with_diloco(setting, wire) for setting in settings]
        name = f"{what}: DiLoCo {wire or 'fp32'}"
        yield Figure(f"{name}, loss", statistics.mean(loss for loss, _ in found), "nats")
        ratios = [loss / before for (loss, _), before in zip(found, reference, strict=True)]
        yield Figure(f"{name}, loss beside synchronous", 100 * (statistics.mean(ratios) - 1), "%", goal)
        yield Figure(f"{name}, the worst of {seeds} seeds", 100 * (max(ratios) - 1), "%")
        question = Question(params=params, replicas=replicas, link=1e9, step_seconds=1)
        planned = plan_for(question, sync_every=sync_every, fragments=1, wire=wire or "fp32").less_communication
        gradients = steps * 4 * 4 * params * (replicas - 1) / replicas
        yield Figure(f"{name}, less communication", gradients / found[0][1], "times", f"{planned:.0f} planned")


def run() -> Iterator[Figure]:
    torch.set_num_threads(1)
    for replicas in (4, 8):
        yield from compare(SIZES["small"], torch.device("cpu"), replicas, 1000, 50, OUTER_LR, 3)


OUTER_LR = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--outer-lr", type=float, default=OUTER_LR)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    for replicas in given.replicas:
        for figure in compare(
            SIZES[given.size],
            torch.device(given.device),
            replicas,
            given.steps,
            given.sync_every,
            given.outer_lr,
            given.seeds,
        ):
            print(figure, flush=True)


if __name__ == "__main__":
    main()
