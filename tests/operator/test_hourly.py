"""What a leader does every hour: remove what is too old. One work that fails does not keep the others from theirs."""

import asyncio

from basilica.core.errors import RuntimeUnavailable
from basilica.machine.clocks import SteadyClock
from basilica.operator.operator import Operator
from basilica.stores.memory import MemoryStore
from basilica.testing.fake_runtime import FakeRuntime


class Alone:
    """An election without anybody else."""

    identity, duration = "alone", 15.0

    async def acquire(self) -> None:
        pass

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        pass


def test_every_work_is_done_although_one_fails() -> None:
    async def story() -> None:
        stop = asyncio.Event()
        done: list[str] = []

        async def fails() -> list[str]:
            done.append("fails")
            raise RuntimeUnavailable("the cluster is away")

        async def removes() -> list[str]:
            done.append("removes")
            stop.set()
            return ["old"]

        clock = SteadyClock()
        operator = Operator(
            MemoryStore(),
            FakeRuntime,
            clock,
            Alone(),  # type: ignore[arg-type]
            hourly=lambda _: (fails, removes),
        )
        async with asyncio.timeout(20):
            await operator.run(stop)
        assert done == ["fails", "removes"]

    asyncio.run(story())
