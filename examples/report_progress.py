"""Two ranks that tell how far they are: last values while they run, and the whole course at the end.

python examples/report_progress.py
"""

import basilica


@basilica.distributed(world_size=basilica.WorldSize(min=2, target=2, max=2), gpu_count=0)
def train(steps: int) -> float:
    import os
    import random
    import time

    import basilica

    noise = random.Random(int(os.environ["RANK"]))
    loss = 2.0
    for step in range(steps):
        loss = 0.97 * loss + 0.02 * noise.random()
        basilica.report(step=step, loss=loss)
        time.sleep(0.02)
    return loss


def show(view: basilica.RunView) -> None:
    for rank in view.ranks:
        told = rank.report
        if told is not None and "loss" in told.values:
            print(f"rank {rank.rank}: step {told.step}, loss {told.values['loss']:.3f}")


if __name__ == "__main__":
    with train(100) as training:
        for view in training.changes(reports=True):
            if isinstance(view, basilica.RunView):
                show(view)
        for series in training.series("loss", points=5):
            course = ", ".join(f"{point.value:.2f} at step {point.step}" for point in series.points)
            print(f"loss of rank {series.rank}: {course}")
