"""Replicas without a control plane: four processes of this machine, one of which fails.

python examples/executor_hello.py
"""

from basilica.executors import LocalProcessExecutor, gather_logs, live_table


def count(steps: int) -> int:
    import os

    rank = int(os.environ["REPLICA_RANK"])
    for step in range(steps):
        print(f"step {step} of rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
    if rank == 2:
        raise ValueError("rank 2 has had enough")
    return rank * steps


if __name__ == "__main__":
    with LocalProcessExecutor() as executor:
        handles = executor.launch_replicas(4, count, {"steps": 2}, timeout=60)
        with live_table(handles) as on_change:
            results = executor.collect(handles, on_change=on_change)
        for result in results:
            print(result["rank"], result["status"], result["result"], result["error"])
        failed = [handle for handle in handles if executor.poll(handle) == "failed"]
        print(gather_logs(executor, failed, n_lines=1), end="")
