"""How attempts are launched, end, are stopped, and outlive those who launched them."""

import asyncio
import time

from basilica.core.seen import SeenRank, Sight
from basilica.core.spec import Exec
from basilica.core.world import WorldSize
from basilica.testing.runtime_contract.world import (
    FOR_EVER,
    PATIENCE_S,
    Opens,
    World,
    story,
)


class Attempts(Opens):
    """Launched once, ended as they end, stopped in order, known to all who come later."""

    @story
    async def test_a_run_of_which_nothing_was_launched_has_no_ranks(self, world: World) -> None:
        assert (await world.look(world.run("true"))).ranks == ()

    @story
    async def test_a_rank_runs_and_its_end_is_told(self, world: World) -> None:
        run = world.run(f"echo hello; while [ ! -e {world.files}/go ]; do sleep 0.02; done; echo done")
        await world.launch(run, 0)
        seen = await world.running(run)
        assert seen.started_at is not None
        assert seen.node
        (world.files / "go").touch()
        ended = await world.ended(run)
        assert (ended.exit_code, ended.reason, ended.stopped, ended.by_platform) == (0, "Completed", False, False)
        assert ended.log_tail[-2:] == ("hello", "done")
        assert run.instance in world.wakes

    @story
    async def test_exit_codes_and_signals_are_told_as_they_are(self, world: World) -> None:
        run = world.run(
            "[ $RANK = 0 ] && exit 7; [ $RANK = 1 ] && kill -KILL $$; kill -40 $$", world=WorldSize(1, 3, 8)
        )
        await world.launch(run, 0, 1, 2)
        failed, killed, real_time = [await world.ended(run, rank) for rank in range(3)]
        assert (failed.exit_code, failed.reason, failed.signal) == (7, "Error", None)
        assert (killed.exit_code, killed.reason, killed.signal) == (137, "SIGKILL", "SIGKILL")
        assert (real_time.exit_code, real_time.reason, real_time.signal) == (168, "signal 40", "signal 40")

    @story
    async def test_a_program_that_is_not_there_is_a_start_error(self, world: World) -> None:
        run = world.run(Exec(("/no/such/program",)))
        await world.launch(run, 0)
        ended = await world.ended(run)
        assert ended.start_error is not None
        assert "/no/such/program" in ended.start_error

    @story
    async def test_a_failed_attempt_is_followed_by_the_next(self, world: World) -> None:
        run = world.run("echo attempt $BASILICA_ATTEMPT; exit $((3 + BASILICA_ATTEMPT))")
        await world.launch(run, 0)
        assert (await world.ended(run, 0, 0)).exit_code == 3
        await world.launch(run, 0, attempt=1)
        again = await world.ended(run, 0, 1)
        assert (again.exit_code, again.log_tail[-1]) == (4, "attempt 1")

    @story
    async def test_what_is_there_already_is_not_launched_again(self, world: World) -> None:
        run = world.run(f"echo x >>{world.files}/starts; {FOR_EVER}")
        await world.launch(run, 0)
        await world.launch(run, 0)
        await world.running(run)
        await world.launch(run, 0)
        await world.launch(run, 1)
        await world.running(run, 1)
        await world.written("starts", "x\nx\n")

    @story
    async def test_an_older_attempt_that_is_alive_is_not_replaced(self, world: World) -> None:
        run = world.run(FOR_EVER)
        await world.launch(run, 0)
        seen = await world.running(run)
        await world.launch(run, 0, attempt=1)
        look = await world.look(run)
        assert [(s.attempt, s.sight) for s in look.ranks] == [(0, Sight.RUNNING)]
        await world.stop(run, seen)
        await world.ended(run)
        await world.launch(run, 0, attempt=1)
        await world.running(run, attempt=1)

    @story
    async def test_a_rank_finds_what_it_needs_in_its_environment(self, world: World) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BASILICA_RANK", "BASILICA_WORLD_MIN", "BASILICA_WORLD_TARGET")
        shown = " ".join(f"{name}=${name}" for name in (*names, "BASILICA_WORLD_MAX", "BASILICA_NAME", "MINE", "TOKEN"))
        known = '[ -n "$MASTER_ADDR$MASTER_PORT$NODE_NAME$BASILICA_RDZV_ENDPOINT$BASILICA_RDZV_ID" ] && echo known'
        run = world.run(f"echo {shown}; {known}", env={"MINE": "a b"}, secrets={"TOKEN": "hush"})
        await world.launch(run, 0, 1)
        tail = (await world.ended(run, 1)).log_tail
        assert tail[-2:] == (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 BASILICA_RANK=1 BASILICA_WORLD_MIN=1 BASILICA_WORLD_TARGET=2 "
            "BASILICA_WORLD_MAX=8 BASILICA_NAME=train MINE=a b TOKEN=hush",
            "known",
        )

    @story
    async def test_values_of_the_rank_stand_in_a_command_line_that_no_shell_reads(self, world: World) -> None:
        run = world.run(Exec(("echo", "$RANK", "${WORLD_SIZE}", "$HOME", "$$")))
        await world.launch(run, 0, 1)
        assert (await world.ended(run, 1)).log_tail[-1] == "1 2 $HOME $$"

    @story
    async def test_two_runs_do_not_touch_each_other(self, world: World) -> None:
        one, two = world.run(FOR_EVER, "one"), world.run("exit 4", "two")
        await world.launch(one, 0)
        await world.launch(two, 0)
        assert (await world.ended(two)).exit_code == 4
        await world.running(one)

    @story
    async def test_a_stopped_rank_may_end_in_order(self, world: World) -> None:
        run = world.run("trap 'echo saved; exit 5' TERM; echo up; while :; do sleep 0.05; done")
        await world.launch(run, 0)
        seen = await world.running(run)
        await world.written_to_log(run, "up")
        await world.stop(run, seen)
        ended = await world.ended(run)
        assert (ended.exit_code, ended.reason, ended.stopped) == (5, "Cancelled", True)
        assert ended.log_tail[-1] == "saved"

    @story
    async def test_one_that_does_not_end_is_killed_when_its_grace_is_over(self, world: World) -> None:
        run = world.run(f"trap '' TERM; echo x >{world.files}/up; while :; do sleep 0.05; done")
        await world.launch(run, 0)
        seen = await world.running(run)
        await world.written("up", "x\n")
        await world.stop(run, seen, grace=0.3)
        ended = await world.ended(run)
        assert (ended.exit_code, ended.signal, ended.stopped) == (137, "SIGKILL", True)

    @story
    async def test_a_later_stop_may_shorten_the_grace(self, world: World) -> None:
        run = world.run(f"trap '' TERM; echo x >{world.files}/up; while :; do sleep 0.05; done")
        await world.launch(run, 0)
        seen = await world.running(run)
        await world.written("up", "x\n")
        await world.stop(run, seen, grace=1000.0)
        await world.stop(run, seen, grace=0.0)
        assert (await world.ended(run)).signal == "SIGKILL"

    @story
    async def test_what_was_stopped_before_it_started_never_starts(self, world: World) -> None:
        run = world.run(f"echo x >>{world.files}/starts")
        never = SeenRank(rank=0, attempt=0, sight=Sight.STARTING)
        await world.stop(run, never)
        ended = await world.ended(run)
        assert (ended.stopped, ended.exit_code) == (True, None)
        await world.launch(run, 0)
        await world.launch(run, 1)
        assert (await world.ended(run, 1)).exit_code == 0
        await world.written("starts", "x\n")

    @story
    async def test_stopping_what_has_ended_changes_nothing(self, world: World) -> None:
        run = world.run("exit 3")
        await world.launch(run, 0)
        await world.ended(run)
        await world.stop(run, SeenRank(rank=0, attempt=0, sight=Sight.RUNNING))
        ended = await world.ended(run)
        assert (ended.exit_code, ended.stopped) == (3, False)

    @story
    async def test_ranks_outlive_their_control_plane_and_their_ends_are_known_to_the_next(self, world: World) -> None:
        script = f"[ $RANK = 0 ] && {{ {FOR_EVER}; }}; while [ ! -e {world.files}/go ]; do sleep 0.02; done; exit 6"
        run = world.run(script)
        await world.launch(run, 0, 1)
        await world.running(run, 0)
        await world.running(run, 1)
        await world.restarted((world.files / "go").touch)
        assert (await world.ended(run, 1)).exit_code == 6
        await world.running(run, 0)

    @story
    async def test_of_what_was_removed_nothing_is_left(self, world: World) -> None:
        run = world.run("echo hello")
        await world.launch(run, 0, 1)
        await world.ended(run, 0)
        await world.ended(run, 1)
        await world.do(lambda: world.runtime.end_rendezvous(run))
        for _ in range(2):
            await world.do(lambda: world.runtime.remove(run))
        end = time.monotonic() + PATIENCE_S
        while (await world.look(run)).ranks:
            assert time.monotonic() < end, "it is still there"
            await asyncio.sleep(0.05)
        assert (await world.look(run)).rendezvous is None
