"""The smallest gang: a function on two ranks, and what each returned.

python examples/hello_gang.py
"""

import basilica


@basilica.distributed(world_size=basilica.WorldSize(min=2, target=2, max=2), gpu_count=0)
def hello(greeting: str) -> str:
    import os

    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    print(f"{greeting} from rank {rank} of {size}")
    return f"rank {rank} was here"


if __name__ == "__main__":
    with hello("Good morning") as training:
        for rank, line in training.stream_logs():
            print(f"{rank}| {line}")
        print(training.results())
