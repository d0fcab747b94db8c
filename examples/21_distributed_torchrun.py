"""Elastic torchrun: two agents train, and a third joins in the middle of the run. Needs torch.

Each rank is a torchrun agent; they meet at the run's own rendezvous, which is the default. The wait after `scale()`
returns when the new world is really up, so the last line says 3.

    python examples/21_distributed_torchrun.py
"""

import basilica


@basilica.distributed(
    world_size=basilica.WorldSize(min=2, target=2, max=4),
    launcher="torchrun",
    gpu_count=0,
    grace_seconds=2,
    delete_on_exit=True,
)
def train() -> None:
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(600):
        x = torch.ones(1)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            print(f"step {step}: {x.item():g} ranks took part", flush=True)
        time.sleep(0.1)


def main() -> None:
    with train() as training:
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
