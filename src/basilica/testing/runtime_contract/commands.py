"""Commands beside ranks."""

import asyncio

from basilica.core.errors import Conflict
from basilica.ports import Output
from basilica.testing.runtime_contract.world import (
    FOR_EVER,
    Holders,
    Opens,
    World,
    story,
)


class Commands(Opens):
    """They run as their rank does, and leave nothing behind."""

    @story
    async def test_a_command_has_the_environment_and_the_directory_of_its_rank(self, world: World) -> None:
        run = world.run(f"pwd >{world.files}/where-$RANK; {FOR_EVER}", env={"MINE": "a b"}, secrets={"TOKEN": "hush"})
        await world.launch(run, 0, 1)
        await world.running(run, 1)
        await world.until(run, 1, 0, lambda _: (world.files / "where-1").exists())
        script = "echo $RANK/$WORLD_SIZE $BASILICA_ATTEMPT $MINE $TOKEN; cat; pwd; echo oh >&2; exit 3"
        out, err, code = await world.command(run, "sh", "-c", script, rank=1)
        assert (err, code) == ("oh\n", 3)
        await world.written("where-1", out.removeprefix("1/2 0 a b hush\n"))

    @story
    async def test_a_command_ends_as_it_does(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        await world.running(run)
        assert await world.command(run, "true") == ("", "", 0)
        assert await world.command(run, "printf", "%s|", "a b", "$HOME", "ü*", "") == ("a b|$HOME|ü*||", "", 0)
        assert await world.command(run, "sh", "-c", "kill -KILL $$") == ("", "", 137)
        _, problem, code = await world.command(run, "no-such-program-here")
        assert code == 127
        assert "cannot execute no-such-program-here" in problem

    @story
    async def test_beside_a_rank_that_was_never_launched_no_command_runs(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        await world.running(run)
        try:
            await world.command(run, "true", rank=3)
        except Conflict as problem:
            assert f"rank 3 of {run.instance} was never launched" in str(problem)  # noqa: PT017 - shipped without pytest
        else:
            raise AssertionError("a command ran beside no rank")

    @story
    async def test_what_a_command_writes_comes_whole_even_if_it_is_much_and_no_text(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        await world.running(run)
        script = "printf '\\303\\274\\377'; head -c 3000000 /dev/zero; printf '\\303' >&2"
        out, err, code = await world.command(run, "sh", "-c", script)
        assert (out[:2], len(out), err, code) == ("ü\ufffd", 3000002, "\ufffd", 0)

    @story
    async def test_what_a_command_leaves_behind_ends_with_it(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        await world.running(run)
        held = Holders(world.files / "held")
        script = f"exec 9>{world.files}/held; setsid sleep 1000 & exit 4"
        assert (await world.command(run, "sh", "-c", script))[2] == 4
        await held.vanish()

    @story
    async def test_a_command_that_nobody_reads_from_its_beginning_ends_too(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        await world.running(run)
        holders = [Holders(world.files / f"held-{turns}") for turns in range(6)]
        for turns, held in enumerate(holders):
            script = f"exec 9>{world.files}/held-{turns}; setsid sleep 1000 & sleep 1000"
            reading = world.runtime.execute(run, 0, ["sh", "-c", script])
            assert await anext(reading) == Output("stdout", "")
            going_on = asyncio.ensure_future(anext(reading))
            for _ in range(turns):  # of the event loop: further and further into the beginning
                await asyncio.sleep(0)
            held.stare(0.2)
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)
            await reading.aclose()
        await world.command(run, "true")  # by then the others would have begun as well
        for held in holders:
            await held.vanish()

    @story
    async def test_a_command_ends_with_all_it_started_when_nobody_reads_any_more(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        await world.running(run)
        held = Holders(world.files / "held")
        reading = world.runtime.execute(
            run, 0, ["sh", "-c", f"exec 9>{world.files}/held; setsid sleep 1000 & sleep 1000"]
        )
        assert await anext(reading) == Output("stdout", "")
        going_on = asyncio.ensure_future(anext(reading))
        await held.appear()
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
        await reading.aclose()
        await held.vanish()
        await world.running(run)
