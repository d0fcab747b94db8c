"""Wake-ups in the moments that a store is hard to bring into."""

import asyncio
from dataclasses import replace

from basilica.ports import Deployment
from basilica.stores.bell import Bell
from basilica.testing.store_contract import a_run, run


def test_a_change_in_the_very_moment_in_which_the_time_is_up_is_returned() -> None:
    async def tell() -> None:
        bell, state = Bell(), a_run()

        def look(instance: str) -> Deployment:
            return state

        wait = asyncio.ensure_future(bell.wait_change(look, "train-1", 0, 0.0))
        await asyncio.sleep(0)  # now it waits, and its time is up in the loop's next round
        state = replace(state, version=1)
        bell.ring("train-1")
        assert await wait == state

    run(tell())


def test_a_slow_reader_finds_the_changes_in_the_order_in_which_they_first_happened() -> None:
    async def tell() -> None:
        bell = Bell()
        changes = bell.changes(["a", "b"])
        for instance in ("c", "a", "d", "c"):
            bell.ring(instance)
        assert [await anext(changes) for _ in range(4)] == ["a", "b", "c", "d"]
        bell.close()
        assert [instance async for instance in changes] == []

    run(tell())
