"""Four replicas that cannot reach each other train one language model through a directory; one is killed on the way.

Run it with `make demo`. It starts a control plane of its own, trains a small model of characters on the source of this
project with DiLoCo (NumPy alone, no torch), kills rank 2 in the middle, and draws the course of the loss: `--curve
FILE.svg` says where, `--picture FILE.svg` saves the last screen. Each rank runs this file with `--replica`.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live

import basilica
from basilica.cli import metrics, show, show_diloco, show_live
from basilica.client.effects import NoAnswer
from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce
from basilica.diloco.bucket import Bucket
from basilica.diloco.inspection import inspect_run
from basilica.diloco.stores import open_store

REPLICAS, VICTIM = 4, 2
ROUNDS, SYNC_EVERY, BATCH = 60, 50, 128
KILL_AT = 15
CONTEXT, EMBEDDING, HIDDEN = 12, 16, 256
SOURCE = Path(__file__).resolve().parents[1] / "src/basilica"
WIDTH = 110


# ---- what a replica does -----------------------------------------------------------------------------------------


class CharacterModel:
    """Says which character follows twelve others: embeddings, a hidden layer, Adam. All by hand."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        letters, self.text = np.unique(codes, return_inverse=True)
        random = np.random.default_rng(0)
        shapes = [(len(letters), EMBEDDING), (CONTEXT * EMBEDDING, HIDDEN), (HIDDEN,), (HIDDEN, len(letters))]
        self.parameters = [
            (random.normal(size=shape) / np.sqrt(max(shape[0], 1))).astype(np.float32)
            if len(shape) > 1
            else np.zeros(shape, np.float32)
            for shape in shapes
        ]
        self._means = [np.zeros_like(p) for p in self.parameters]
        self._squares = [np.zeros_like(p) for p in self.parameters]
        self._steps = 0

    def step(self, random: np.random.Generator) -> float:
        """One inner step on a random batch; its loss."""
        starts = random.integers(0, len(self.text) - CONTEXT, BATCH)
        inputs, targets = self.text[starts[:, None] + np.arange(CONTEXT)], self.text[starts + CONTEXT]
        embedding, first, bias, last = self.parameters
        seen = embedding[inputs].reshape(BATCH, -1)
        hidden = np.tanh(seen @ first + bias)
        scores = hidden @ last
        scores -= scores.max(1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(1, keepdims=True)
        loss = -np.log(chances[np.arange(BATCH), targets] + 1e-9).mean()
        chances[np.arange(BATCH), targets] -= 1
        chances /= BATCH
        back = (chances @ last.T) * (1 - hidden**2)
        to_embedding = np.zeros_like(embedding)
        np.add.at(to_embedding, inputs, (back @ first.T).reshape(BATCH, CONTEXT, EMBEDDING))
        self._adam([to_embedding, seen.T @ back, back.sum(0), hidden.T @ chances])
        return float(loss)

    def _adam(self, gradients: list[Any], rate: float = 3e-3) -> None:
        self._steps += 1
        for parameter, gradient, mean, square in zip(
            self.parameters, gradients, self._means, self._squares, strict=True
        ):
            mean[...] += 0.1 * (gradient - mean)
            square[...] += 0.01 * (gradient**2 - square)
            ahead = mean / (1 - 0.9**self._steps)
            parameter[...] -= rate * ahead / (np.sqrt(square / (1 - 0.99**self._steps)) + 1e-8)


def replica(uri: str) -> None:
    """DiLoCo around the loop. A replica that was killed comes back, takes what the others agreed on, and goes on."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = CharacterModel("\n".join(path.read_text() for path in sorted(SOURCE.rglob("*.py"))))
    smooth = None
    with (
        ObjectStoreAllReduce(uri, rank, world_size, quorum=REPLICAS - 1, grace=0.5) as allreduce,
        ArrayDiLoCo(model.parameters, allreduce, sync_every=SYNC_EVERY) as diloco,
    ):
        while diloco.round < ROUNDS:
            loss = model.step(np.random.default_rng([rank, diloco.step_count]))
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            if diloco.step(samples=BATCH):
                print(f"round {diloco.round}: loss {smooth:.3f}", flush=True)
            basilica.report(step=diloco.step_count, loss=smooth)


# ---- the demo ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica", metavar="URI", help="be one of the replicas")
    parser.add_argument("--curve", type=Path, default=Path("loss.svg"), help="where to draw the loss")
    parser.add_argument("--picture", type=Path, help="save the last screen as SVG")
    options = parser.parse_args()
    if options.replica:
        replica(options.replica)
        return
    console = Console(record=True, width=WIDTH if options.picture else None)
    with control_plane() as state:
        uri = f"file://{state}/bucket"
        training = basilica.distributed(
            name="diloco-demo",
            command=[sys.executable, "-u", str(Path(__file__).resolve()), "--replica", uri],
            world_size=basilica.WorldSize(min=REPLICAS - 1, target=REPLICAS, max=REPLICAS),
            max_restarts=1,
            gpu_count=0,
            env={"OPENBLAS_NUM_THREADS": "1"},
            wait=False,
        )
        watch(training, Bucket(open_store(uri)), console)
        tell(training, Bucket(open_store(uri)), console, options.curve)
    if options.picture:
        options.picture.write_text(picture_of(console), encoding="utf-8")
    if training.phase != "succeeded":
        raise SystemExit(f"the run ended as {training.phase}: {training.message}")


def picture_of(console: Console) -> str:
    """The screen as an SVG that loads no font from anywhere."""
    drawn = re.sub(r"@font-face {.*?}", "", console.export_svg(title="make demo"), flags=re.DOTALL)
    return drawn.replace("Fira Code", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono'")


@contextmanager
def control_plane() -> Iterator[str]:
    """A server of our own, embedded, in a temporary directory; whatever else is configured does not count."""
    with tempfile.TemporaryDirectory(prefix="basilica-demo-") as state:
        for name in ("BASILICA_API_URL", "BASILICA_API_TOKEN", "BASILICA_API_KEY"):
            os.environ.pop(name, None)
        os.environ["BASILICA_STATE_DIR"] = state
        try:
            yield state
        finally:
            basilica.shutdown(Path(state), cancel_runs=True)


def watch(training: basilica.DistributedTraining, bucket: Bucket, console: Console) -> None:
    """Show every change until the end; in the middle, kill a replica as a power cut would."""
    killed = False
    with Live(console=console, auto_refresh=False) as live:
        for view in training.changes(reports=True):
            if isinstance(view, NoAnswer):
                continue
            frame = show_live.Frame(view=view, events=training.events(limit=show_live.EVENTS_SHOWN))
            live.update(show_live.screen(frame, width=console.width, height=console.height), refresh=True)
            if not killed and _rounds(bucket) >= KILL_AT:
                killed = kill(bucket)


def _rounds(bucket: Bucket) -> int:
    return len(bucket.store.list("run/log/"))


def kill(bucket: Bucket) -> bool:
    """The bucket knows who takes part, and as which process."""
    victim = next(member for member in bucket.documents("members") if member["rank"] == VICTIM)
    os.kill(victim["pid"], signal.SIGKILL)
    return True


def tell(training: basilica.DistributedTraining, bucket: Bucket, console: Console, curve: Path) -> None:
    """The loss as a picture and in characters, what the bucket says of the rounds, and how each rank ended."""
    series = training.series("loss", points=400)
    curve.parent.mkdir(parents=True, exist_ok=True)
    curve.write_text(metrics.picture(series, f"DiLoCo, {REPLICAS} replicas, rank {VICTIM} killed"), encoding="utf-8")
    found = inspect_run(bucket)
    without = [entry["round"] for entry in found.rounds if str(VICTIM) not in entry["weights"]]
    console.print("" if console.is_terminal else "\n")
    console.print(metrics.table(training.series("loss", points=metrics.CURVE_WIDTH), training.ranks))
    console.print()
    console.print(show.exits(training.rank_exits, None))
    console.print()
    console.print(
        f"{len(found.rounds)} rounds, {found.rounds[-1]['samples']:,.0f} samples, "
        f"{show_diloco.size(sum(e['bytes_up'] for e in found.rounds))} up by one replica; "
        f"{f'rank {VICTIM} was missed in rounds {without[0]} to {without[-1]}' if without else 'nobody was missed'}. "
        f"The loss is drawn in {curve}.",
        highlight=False,
    )


if __name__ == "__main__":
    began = time.monotonic()
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; nothing of it is left running") from None
    if "--replica" not in sys.argv:
        print(f"done in {time.monotonic() - began:.1f} s")
