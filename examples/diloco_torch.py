"""A small transformer, trained with DiLoCo by replicas that meet in an object store: three lines around a usual loop.

    python examples/diloco_torch.py                                                  # four processes of this machine
    python examples/diloco_torch.py --executor basilica                              # the same under a control plane
    python examples/diloco_torch.py --executor eks -o image=registry.example/train:1 --uri s3://bucket/run-7

`train` does not change with the executor. Killed and started again with the same URI, a run goes on where it was.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from typing import Any

import torch
from torch import nn

from basilica import executors
from basilica.diloco import DiLoCo, ObjectStoreAllReduce

CONTEXT, WIDTH, HEADS, LAYERS = 48, 64, 4, 2
EXECUTORS = {
    "local": "LocalProcessExecutor",
    "basilica": "BasilicaExecutor",
    "eks": "EKSExecutor",
    "sagemaker": "SageMakerExecutor",
    "modal": "ModalSpawnExecutor",
}


def train(
    rendezvous_uri: str, steps: int = 400, sync_every: int = 50, batch_size: int = 16, wire: str | None = None
) -> float:
    """What each replica does; the loss of the agreed model on text that nobody trained on."""
    rank, world_size = int(os.environ["REPLICA_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    allreduce = ObjectStoreAllReduce(rendezvous_uri, rank, world_size, wire=wire)
    with allreduce, DiLoCo(model, optimizer, allreduce, sync_every=sync_every) as diloco:
        while diloco.step_count < steps:
            inputs, targets = batch(batch_size, seed=f"{rank} {diloco.step_count}", device=device)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if diloco.step(samples=len(inputs)):
                print(f"round {diloco.round}: loss {loss.item():.3f}, {diloco.samples:.0f} samples", flush=True)
        diloco.take_agreed()

    with torch.no_grad():
        inputs, targets = batch(128, seed="held out", device=device)
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.letters(inputs) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.together = nn.Linear(WIDTH, WIDTH)
        self.alone = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.first(x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        seen = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.together(seen.transpose(1, 2).flatten(2))
        moved: torch.Tensor = x + self.alone(self.second(x))
        return moved


def batch(size: int, seed: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of a text that a small grammar makes, and the same pieces one letter later."""
    dice = random.Random(seed)
    rows: list[list[int]] = []
    while len(rows) < size:
        text = " ".join(sentence(dice) for _ in range(6))
        start = dice.randrange(20)
        rows.append(list(text.encode()[start : start + CONTEXT + 1]))
    letters = torch.tensor(rows, device=device)
    return letters[:, :-1], letters[:, 1:]


def sentence(dice: random.Random) -> str:
    who, other = dice.choice(("a cat", "the old king", "every child", "my friend")), dice.choice(("a bird", "the sea"))
    what = dice.choice(("watches", "follows", "remembers", "sings to"))
    count = dice.randrange(2, 6)
    again = f" and counts: {' '.join(str(n) for n in range(1, count))}" if dice.random() < 0.5 else ""
    return f"{who} {what} {other}{again}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=EXECUTORS, default="local")
    parser.add_argument("-o", "--option", action="append", default=[], help="of the executor, NAME=VALUE")
    parser.add_argument("--uri", help="where the replicas meet; without it, a temporary directory")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--wire", choices=("fp16", "bf16", "int8", "int4"))
    given = parser.parse_args()
    options: dict[str, Any] = dict(option.split("=", 1) for option in given.option)
    executor = getattr(executors, EXECUTORS[given.executor])(**options)
    with tempfile.TemporaryDirectory(prefix="basilica-diloco-") as directory:
        arguments = {
            "rendezvous_uri": given.uri or f"file://{directory}",
            "steps": given.steps,
            "sync_every": given.sync_every,
            "wire": given.wire,
        }
        handles = executor.launch_replicas(given.replicas, "diloco_torch:train", arguments)
        with executors.live_table(handles) as on_change:
            results = executor.collect(handles, on_change=on_change)
    for result in results:
        print(result["rank"], result["status"], json.dumps(result["result"]), result["error"] or "")
    if any(result["status"] != "succeeded" for result in results):
        print(executors.gather_logs(executor, handles), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
