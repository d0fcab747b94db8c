"""Who asks the API of a cluster on which no operator is at work is told so."""

import asyncio
import time
from collections.abc import Callable

from basilica.kube.client.api import KubeApi
from basilica.operator.attendance import PATIENCE, Attendance
from basilica.operator.election import Election
from basilica_testkube import KubeServer
from tests.operator.cluster import LEASE_SECONDS

PATIENCE_S = 30.0


class Clock:
    """Goes on by itself, and faster when told to."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def test_an_operator_that_is_gone_is_missed_and_one_that_comes_back_is_noticed() -> None:
    async def story(url: str) -> None:
        clock = Clock()
        async with KubeApi(url) as api, Attendance(api, "default", clock) as operators:
            assert operators.absent_for is None  # it may only not have been seen yet
            election = Election(api, namespace="default", identity="one", duration=LEASE_SECONDS)
            await election.acquire()
            keeping = asyncio.create_task(election.keep())
            await until(lambda: operators.absent_for is None)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            clock.ahead = LEASE_SECONDS * PATIENCE * 100
            await until(lambda: (operators.absent_for or 0.0) > LEASE_SECONDS * PATIENCE)
            keeping = asyncio.create_task(election.keep())
            await until(lambda: operators.absent_for is None)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    with KubeServer(processes=False) as kube:
        asyncio.run(story(kube.url))


def test_who_sees_nothing_does_not_blame_the_operator() -> None:
    async def story(kube: KubeServer) -> None:
        clock = Clock()
        async with KubeApi(kube.url) as api, Attendance(api, "default", clock) as operators:
            await until(lambda: operators._lease.is_synced)
            clock.ahead = 1000.0
            assert operators.absent_for is not None
            kube.close()
            await until(lambda: operators.absent_for is None)
            clock.ahead += 60.0
            away = operators.absence
            assert away is not None
            assert away.of == "cluster"
            assert away.seconds >= 60.0

    with KubeServer(processes=False) as kube:
        asyncio.run(story(kube))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.02)
