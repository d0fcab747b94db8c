"""Elastic torchrun: two agents train, and a third joins in the middle of the run. Needs torch.

The wait after `scale()` returns when the new world is really up, so the last line says 3.

    python examples/21_distributed_torchrun.py
"""

import sys
import tempfile
from pathlib import Path

import basilica

TRAIN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(600):
    x = torch.ones(1)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        print(f"step {step}: {x.item():g} ranks took part", flush=True)
    time.sleep(0.1)
"""


def main() -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "train.py"
        script.write_text(TRAIN)
        training = basilica.BasilicaClient().deploy_distributed(
            command=[
                torchrun,
                "--nnodes=$BASILICA_WORLD_MIN:$BASILICA_WORLD_MAX",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT",
                "--rdzv-id=$BASILICA_RDZV_ID",
                "--rdzv-conf=last_call_timeout=2",
                "--max-restarts=10",
                str(script),
            ],
            env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            world_size=basilica.WorldSize(min=2, target=2, max=4),
            gpu_count=0,
            grace_seconds=2,
            delete_on_exit=True,
        )
        with training:
            wait_for_line(training, "2 ranks took part")
            training.scale(target=3)
            world = training.wait_until_target_world(timeout=60)
            wait_for_line(training, "3 ranks took part")
            print("world:", world.ready)


def wait_for_line(training: basilica.DistributedTraining, text: str) -> None:
    for rank, line in training.stream_logs():
        if text in line:
            print(f"{rank}| {line}")
            return


if __name__ == "__main__":
    main()
