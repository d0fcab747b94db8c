"""torchrun on two ranks, which sum a tensor over gloo. Needs torch.

Each rank is one torchrun agent with one worker; they meet at MASTER_ADDR:MASTER_PORT, which every rank is given.

    python examples/torchrun_allreduce.py
"""

import sys
import tempfile
from pathlib import Path

import basilica

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {x.item():g}", flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "all_reduce.py"
        script.write_text(ALL_REDUCE)
        training = basilica.BasilicaClient().deploy_distributed(
            command=[
                torchrun,
                "--nnodes=2",
                "--nproc-per-node=1",
                "--node-rank=$RANK",
                "--master-addr=$MASTER_ADDR",
                "--master-port=$MASTER_PORT",
                str(script),
            ],
            world_size=basilica.WorldSize(2, 2, 2),
            gpu_count=0,
            delete_on_exit=True,
        )
        with training:
            training.join(timeout=120)
            print(training.logs())


if __name__ == "__main__":
    main()
