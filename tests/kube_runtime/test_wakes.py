"""Wake-ups while a gang starts and ends: few, whatever its size, and none late that turns the run."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from basilica.runtimes.kubernetes.wakes import QUIET_S, SWEEP_FROM, Tally, Wakes


class FakeTime(asyncio.SelectorEventLoop):
    """A loop whose clock only goes on when nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def told(story: Callable[["Rings"], Coroutine[Any, Any, None]]) -> "Rings":
    with asyncio.Runner(loop_factory=FakeTime) as runner:
        rings = Rings()
        runner.run(story(rings))
        return rings


class Rings:
    """When the run was looked at, and how it stood then."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.stands = Tally()
        self.wakes = Wakes(lambda _: self.at.append(asyncio.get_running_loop().time()), lambda _: self.stands)

    async def changes(self, number: int, within: float) -> None:
        for _ in range(number):
            self.wakes.changed("run")
            await asyncio.sleep(within / number)


@pytest.mark.parametrize("seconds", [4, 60])
def test_how_many_there_are_does_not_depend_on_how_much_changes(seconds: int) -> None:
    few = told(lambda rings: rings.changes(20 * seconds, seconds))
    many = told(lambda rings: rings.changes(400 * seconds, seconds))
    assert len(few.at) <= 50
    assert abs(len(many.at) - len(few.at)) <= 5


def test_what_changes_after_a_quiet_while_is_told_at_once() -> None:
    async def story(rings: Rings) -> None:
        await rings.changes(100, 10.0)
        await asyncio.sleep(10.0 + QUIET_S)
        before = len(rings.at)
        rings.wakes.changed("run")
        assert len(rings.at) == before + 1

    told(story)


def test_the_last_change_is_never_lost() -> None:
    async def story(rings: Rings) -> None:
        await rings.changes(100, 10.0)
        last = asyncio.get_running_loop().time()
        rings.wakes.changed("run")
        await asyncio.sleep(10.0)
        assert rings.at[-1] >= last

    told(story)


@pytest.mark.parametrize(
    "turned",
    [
        Tally(answers=True, up=2, marks=(2, 8)),
        Tally(answers=True, up=8, marks=(2, 8)),
        Tally(answers=True, up=1, ended=1, failed=1, marks=(2, 8)),
        Tally(answers=True, ended=8, marks=(2, 8)),
    ],
    ids=["min", "target", "failure", "all ended"],
)
def test_what_turns_the_run_does_not_wait(turned: Tally) -> None:
    async def story(rings: Rings) -> None:
        rings.stands = Tally(answers=True, up=1, marks=(2, 8))
        await rings.changes(100, 10.0)
        rings.wakes.changed("run")
        before = len(rings.at)
        rings.stands = turned
        rings.wakes.changed("run")
        assert len(rings.at) == before + 1
        rings.wakes.changed("run")
        assert len(rings.at) == before + 1  # once

    told(story)


def test_runs_of_which_nothing_is_heard_any_more_leave_nothing_behind() -> None:
    async def story(rings: Rings) -> None:
        for number in range(10 * SWEEP_FROM):
            rings.wakes.changed(f"run-{number}")
            await asyncio.sleep(1.0)
        assert len(rings.wakes._bursts) <= SWEEP_FROM

    told(story)


def test_a_rendezvous_that_begins_to_answer_does_not_wait() -> None:
    assert Tally(answers=True).turned_since(Tally())
    assert not Tally(answers=True).turned_since(Tally(answers=True))
