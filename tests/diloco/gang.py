"""Replicas as threads of the test, which meet in memory."""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from basilica.diloco import ObjectStoreAllReduce

T = TypeVar("T")
SECONDS = 30.0


def fresh_uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


def gang(replicas: int, work: Callable[[ObjectStoreAllReduce], T], uri: str | None = None, **options: Any) -> list[T]:
    """What each replica returned; the first error, if one failed."""
    place = uri or fresh_uri()

    def replica(rank: int) -> T:
        with ObjectStoreAllReduce(place, rank, replicas, **{"timeout": SECONDS, **options}) as allreduce:
            return work(allreduce)

    with ThreadPoolExecutor(replicas) as threads:
        return [future.result() for future in [threads.submit(replica, rank) for rank in range(replicas)]]


class Crossing:
    """Lets all replicas wait for each other, so that a test can order what they do."""

    def __init__(self, replicas: int) -> None:
        self._barrier = threading.Barrier(replicas, timeout=SECONDS)

    def wait(self) -> None:
        self._barrier.wait()
