"""Scripts of other frameworks grow and shrink with the world as plain torchrun does: their workers are torchrun's.

What they need is installed by `make setup`; without it there is nothing to try.
"""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rendezvous.harness import free_port, service_process
from tests.support.agents import Fleet, driven

pytestmark = pytest.mark.timeout(300)

CONF = "timeout=600,last_call_timeout=500"  # a test that had to wait for this would fail


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    with service_process(tmp_path / "keys", "--port", str(port)):
        yield f"127.0.0.1:{port}"


LIGHTNING = """
import os, signal, sys, time
import lightning, torch, torch.distributed as dist

folder = sys.argv[1]

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.ledger = open(f"{folder}/steps", "a", buffering=1)

    def training_step(self, batch, _):
        numbers = torch.tensor([self.global_rank + 1.0, float(os.path.exists(f"{folder}/stop"))])
        dist.all_reduce(numbers)
        self.ledger.write(f"{time.time()} {self.trainer.world_size} {self.global_rank} {numbers[0].item():g} "
                          f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['AGENT']}\\n")
        self.trainer.should_stop = bool(numbers[1].item())
        time.sleep(0.05)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class EndWhenAsked(lightning.Callback):
    def on_train_start(self, trainer, module):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
size = dict(devices=1, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]))
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", max_epochs=1, callbacks=[EndWhenAsked()], **size, **quiet
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(100_000, 1)))
"""


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_lightning_script_goes_on_with_a_larger_and_a_smaller_world(endpoint: str, tmp_path: Path) -> None:
    options = [f"--rdzv-conf={CONF}"]
    with (
        Fleet(endpoint, "light", tmp_path / "run", nodes=(1, 2), options=options, script=LIGHTNING) as run,
        driven(endpoint, "light"),
    ):
        _grow_and_shrink(run, workers=1)


ACCELERATE = """
import os, sys, time
import accelerate, torch

folder, it = sys.argv[1], accelerate.Accelerator(cpu=True)
with open(f"{folder}/steps", "a", buffering=1) as ledger:
    while True:
        stop = float(os.path.exists(f"{folder}/stop"))
        numbers = it.reduce(torch.tensor([it.process_index + 1.0, stop]), "sum")
        ledger.write(f"{time.time()} {it.num_processes} {it.process_index} {numbers[0].item():g} "
                     f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['AGENT']}\\n")
        if numbers[1].item():
            break
        time.sleep(0.05)
it.end_training()
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch_goes_on_with_a_larger_and_a_smaller_world(endpoint: str, tmp_path: Path) -> None:
    """It knows no range of machines; torchrun, which it calls, takes that from its own variables."""
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2"]
    launcher += ["--main_process_port=0", "--rdzv_backend=basilica", f"--rdzv_conf={CONF}", "--max_restarts=10"]
    env = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_ID": "accelerated"}
    with (
        Fleet(
            endpoint,
            "accelerated",
            tmp_path / "run",
            nodes=(1, 2),
            script=ACCELERATE,
            launcher=launcher,
            env=env | {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"},
        ) as run,
        driven(endpoint, "accelerated"),
    ):
        _grow_and_shrink(run, workers=2)


def _grow_and_shrink(run: Fleet, *, workers: int) -> None:
    run.want(1)
    began = time.time()
    agents = run.start()
    run.first_step(workers, began)
    run.want(2)
    began = time.time()
    agents += run.start()
    run.first_step(2 * workers, began)
    run.want(1)
    began = time.time()
    agents.pop().terminate()
    run.first_step(workers, began)
    assert run.finish(agents) == [0]
    assert "forcefully" not in agents[0].said()  # its workers ended when they were asked to
    assert [step for step in run.steps() if step.sum != step.world * (step.world + 1) / 2] == []
