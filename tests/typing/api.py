"""How the public API reads to a type checker: checked by `make types`, never run."""

from collections.abc import Iterator
from typing import Any, assert_type

import basilica


def client() -> None:
    made = basilica.BasilicaClient()
    training = made.deploy_distributed("x", command=["true"], world_size=basilica.WorldSize(1, 1, 1))
    assert_type(training, basilica.DistributedTraining)
    assert_type(training.scale(2), basilica.WorldStatus)
    assert_type(training.join(), basilica.WorldStatus)
    assert_type(training.results(), dict[int, Any])
    assert_type(training.rank_exits, list[basilica.RankExit])
    assert_type(training.culprit, basilica.Culprit | None)
    assert_type(training.stream_logs(), Iterator[tuple[int, str]])
    assert_type(training.series("loss"), list[basilica.Series])
    assert_type(training.ranks[0].report, basilica.RankReport | None)
    assert_type(training.ranks[0].stalled, basilica.Stalled | None)
    assert_type(made.list(), list[basilica.RunView])
    made.deploy_distributed("x", command=["true"], world_size=basilica.WorldSize(1, 1, 1), gpus=1)  # type: ignore[call-arg]
    made.deploy_distributed("x", command=["true"])  # type: ignore[call-arg]


async def awaited(made: basilica.BasilicaClient) -> None:
    training = await made.deploy_distributed_async(command="true", world_size=basilica.WorldSize(1, 1, 1))
    assert_type(await training.wait_until_complete_async(), basilica.WorldStatus)
    async for rank, line in training.stream_logs_async():
        assert_type(rank, int)
        assert_type(line, str)


@basilica.distributed(world_size=basilica.WorldSize(1, 1, 1))
def train(steps: int) -> float:
    return 1.0 / steps


def decorated() -> None:
    assert_type(train(3), basilica.DistributedTraining)
    assert_type(train.local(3), float)
    train("three")  # type: ignore[arg-type]


def reporting(loss: float) -> None:
    assert_type(basilica.report(step=1, loss=loss), None)
    basilica.report(step=1, loss="small")  # type: ignore[arg-type]


def noticing() -> None:
    notice = basilica.notice()
    assert_type(notice, basilica.Notice | None)
    if notice is not None:
        assert_type(notice.seconds_left, float)
        assert_type(notice.target, int | None)
        assert_type(notice.ready(timeout=1.5), None)


def sampling() -> None:
    samples = basilica.Samples(1_000, 8, seed=1, epochs=None, micro_batch=2)
    for indices in samples:
        assert_type(indices, list[int])
        assert_type(samples.split(indices), list[list[int]])
    assert_type(samples.weight, float)
    assert_type(samples.remaining, int | None)
    basilica.Samples(1_000, "8")  # type: ignore[arg-type]
