"""What every `Runtime` promises, as a test class. Subclass it, say how to open yours, and run pytest:

class TestMyRuntime(RuntimeContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Runtime]:
        yield MyRuntime(directory)

Ranks are real: they run `sh`, and write to files of this machine. A runtime that is opened a second time in a directory
succeeds the first.
"""

import asyncio
import inspect
import io
import os
import random
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from basilica.core.actions import Launch, Stop
from basilica.core.errors import Conflict, RuntimeUnavailable, ValidationError
from basilica.core.mesh import Announcement, Gate
from basilica.core.reports import Series, SeriesQuery
from basilica.core.seen import Ended, SeenRank, Sight, Sighting
from basilica.core.spec import DeploymentSpec, Exec, Shell
from basilica.core.world import WorldSize
from basilica.ports import Exited, Output, Run, Runtime, StoredArchive

PATIENCE_S = 30.0
STORY_SECONDS = 100.0
FOR_EVER = "trap 'exit 0' TERM; while :; do sleep 0.05; done"

Contract = TypeVar("Contract", bound="RuntimeContract")


def story(test: Callable[[Contract, "World"], Awaitable[None]]) -> Callable[[Contract, Path], None]:
    """Make a test of a coroutine that takes a world with an open runtime."""

    def told(self: Contract, tmp_path: Path) -> None:
        async def tell() -> None:
            world = World(self, tmp_path)
            async with world.control_plane():
                await test(self, world)

        asyncio.run(asyncio.wait_for(tell(), STORY_SECONDS))

    told.__name__, told.__qualname__, told.__doc__ = test.__name__, test.__qualname__, inspect.getdoc(test)
    return told


def packed(files: Mapping[str, str]) -> bytes:
    """A directory as it is sent. All of its files may be executed."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return content.getvalue()


def reporting(code: str) -> Exec:
    """A Python program that can `report`."""
    return Exec((sys.executable, "-c", f"from basilica import report\n{code}"))


class World:
    """A runtime with what a controller would do, and waits that it wakes."""

    def __init__(self, contract: "RuntimeContract", directory: Path) -> None:
        self._contract, self._state, self.files = contract, directory / "state", directory / "files"
        self.files.mkdir()
        self._woken = asyncio.Event()
        self.wakes: list[str] = []
        self._runs: list[Run] = []
        self._opened = AsyncExitStack()
        self.lets_hosts_go = True
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "no control plane is up"
        return self._runtime

    @asynccontextmanager
    async def control_plane(self) -> AsyncIterator[None]:
        """At the end nothing of what the story made is left."""
        await self._open()
        try:
            yield
            await self._end_all()
        finally:
            await self._close()

    async def _open(self) -> None:
        self._runtime = await self._opened.enter_async_context(self._contract.opened(self._state))
        await self._runtime.start(self._wake)

    async def _close(self) -> None:
        await self.runtime.close()
        self._runtime = None
        await self._opened.aclose()

    def _wake(self, instance: str) -> None:
        self.wakes.append(instance)
        self._woken.set()

    async def restarted(self, meanwhile: Callable[[], None]) -> None:
        """This control plane lets go, something happens, and another takes over."""
        await self._close()
        meanwhile()
        await self._open()

    async def _end_all(self) -> None:
        for run in self._runs:
            living = [seen for seen in (await self.look(run)).ranks if seen.sight is not Sight.ENDED]
            await self.stop(run, *living, grace=0.0)
            for seen in living:
                await self.ended(run, seen.rank, seen.attempt)
            await self.do(partial(self.runtime.end_rendezvous, run))
            await self.do(partial(self.runtime.remove, run))

    def run(self, script: str | Exec, name: str = "train", **spec: Any) -> Run:
        """A run, of two ranks if nothing else is said."""
        program = script if isinstance(script, Exec) else Shell(script)
        spec = {"world": WorldSize(1, 2, 8), "grace_seconds": 10.0, **spec}
        run = Run(
            instance=f"{name}-0a1b2c3d",
            user="ada",
            namespace=self._contract.namespace,
            created_at=time.time(),
            spec=DeploymentSpec(name=name, program=program, **spec),
        )
        self._runs.append(run)
        return run

    async def do(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """What a controller does with an action that cannot be done now: ask for it again."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await action()
            except RuntimeUnavailable:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def look(self, run: Run) -> Sighting:
        """What a look shows. Hosts are let go as a controller does it: ranks may wait for that."""
        found: Sighting = await self.do(partial(self.runtime.observe, run))
        if self.lets_hosts_go and found.rendezvous is not None and found.mesh is not None:
            released = Announcement(run.spec.world.target, tuple((host, Gate.READY) for host in found.mesh.hosts))
            if found.rendezvous.says != released:
                await self.do(partial(self.runtime.announce, run, released))
        return found

    async def launch(self, run: Run, *ranks: int, attempt: int = 0) -> None:
        size = run.spec.world.target
        await self.do(lambda: self.runtime.launch(run, [Launch(rank, attempt, size) for rank in ranks]))

    async def stop(self, run: Run, *ranks: SeenRank, grace: float = 10.0) -> None:
        stops = [Stop(seen.rank, seen.attempt, grace) for seen in ranks]
        if stops:
            await self.do(lambda: self.runtime.stop(run, stops))

    async def until(self, run: Run, rank: int, attempt: int, condition: Callable[[SeenRank], object]) -> SeenRank:
        """The attempt as soon as a look shows it so."""
        end = time.monotonic() + PATIENCE_S
        last: Sighting | None = None
        while time.monotonic() < end:
            self._woken.clear()
            last = await self.look(run)
            for seen in last.ranks:
                if (seen.rank, seen.attempt) == (rank, attempt) and condition(seen):
                    return seen
            try:
                await asyncio.wait_for(self._woken.wait(), 0.5)
            except TimeoutError:
                continue
        raise TimeoutError(f"rank {rank}, attempt {attempt}: the last look was {last}")

    async def running(self, run: Run, rank: int = 0, attempt: int = 0) -> SeenRank:
        return await self.until(run, rank, attempt, lambda seen: seen.sight is Sight.RUNNING)

    async def ended(self, run: Run, rank: int = 0, attempt: int = 0) -> Ended:
        seen = await self.until(run, rank, attempt, lambda seen: seen.sight is Sight.ENDED)
        assert seen.ended is not None
        return seen.ended

    async def written(self, name: str, text: str) -> None:
        """Return when a rank has written that to its file."""
        end = time.monotonic() + PATIENCE_S
        while not (self.files / name).exists() or (self.files / name).read_text() != text:
            assert time.monotonic() < end, f"{name} was not written"
            await asyncio.sleep(0.02)

    async def written_to_log(self, run: Run, line: str, rank: int = 0) -> None:
        """Return when the rank's log has that line."""
        end = time.monotonic() + PATIENCE_S
        while line not in (await self.runtime.tail(run, rank, None)).lines:
            assert time.monotonic() < end, f"{line!r} was not written"
            await asyncio.sleep(0.02)

    async def command(self, run: Run, *argv: str, rank: int = 0) -> tuple[str, str, int]:
        """What a command beside the rank wrote to its two streams, and its exit code."""
        written = {"stdout": "", "stderr": ""}
        async with aclosing(self.runtime.execute(run, rank, argv)) as output:
            async for found in output:
                match found:
                    case Output(stream, text):
                        written[stream] += text
                    case Exited(code):
                        assert await anext(output, None) is None, "something came after the exit"
                        return written["stdout"], written["stderr"], code
        raise AssertionError("the command never ended")

    async def announced(self, run: Run, wanted: Announcement) -> None:
        """Announce as a controller does: until a look shows that it is said."""
        end = time.monotonic() + PATIENCE_S
        while (seen := (await self.look(run)).rendezvous) is None or seen.says != wanted:
            assert time.monotonic() < end, f"it says {seen}"
            await self.do(partial(self.runtime.announce, run, wanted))
            await asyncio.sleep(0.05)

    async def send(self, user: str, content: bytes) -> StoredArchive:
        """In pieces, as it comes over a network."""

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(content), 100_000):
                yield content[at : at + 100_000]

        return await self.runtime.store_archive(user, pieces())

    async def reported(self, run: Run, *, step: int) -> None:
        """Return when that is the last step of rank 0."""
        end = time.monotonic() + PATIENCE_S
        while (last := (await self.do(lambda: self.runtime.reports(run))).get(0)) is None or last.step != step:
            assert time.monotonic() < end, f"the last report is {last}"
            await asyncio.sleep(0.05)

    async def series(self, run: Run, query: SeriesQuery | None = None, *, points: int | None = None) -> list[Series]:
        """Those that are asked for, as soon as the first of them has so many points."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found: list[Series] = await self.do(lambda: self.runtime.series(run, query or SeriesQuery()))
            if points is None or (found and len(found[0].points) == points):
                return found
            assert time.monotonic() < end, f"the series are {found}"
            await asyncio.sleep(0.05)

    async def without_rendezvous(self, run: Run) -> None:
        end = time.monotonic() + PATIENCE_S
        while (await self.look(run)).rendezvous is not None:
            assert time.monotonic() < end, "it is still there"
            await asyncio.sleep(0.05)


class Holders:
    """Knows whether a process still has a pipe open that is given to it by its name."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    async def appear(self) -> None:
        await self._become(held=True)

    async def vanish(self) -> None:
        await self._become(held=False)
        os.close(self._reading)

    async def _become(self, *, held: bool) -> None:
        end = time.monotonic() + PATIENCE_S
        while self._held() is not held:
            assert time.monotonic() < end, "nobody came" if held else "somebody is still there"
            await asyncio.sleep(0.02)

    def _held(self) -> bool:
        try:
            return bool(os.read(self._reading, 1))
        except BlockingIOError:
            return True


class RuntimeContract:
    """`namespace` is that of the user `ada`."""

    namespace = "u-ada"

    def opened(self, directory: Path) -> AbstractAsyncContextManager[Runtime]:
        """A runtime that is not started; what an earlier one kept in the directory is there."""
        raise NotImplementedError

    # ---- how attempts end ------------------------------------------------------------------------------------------

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
        run = world.run("[ $RANK = 0 ] && exit 7; kill -KILL $$")
        await world.launch(run, 0, 1)
        failed, killed = await world.ended(run, 0), await world.ended(run, 1)
        assert (failed.exit_code, failed.reason, failed.signal) == (7, "Error", None)
        assert (killed.exit_code, killed.reason, killed.signal) == (137, "SIGKILL", "SIGKILL")

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

    # ---- launching -------------------------------------------------------------------------------------------------

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

    # ---- stopping --------------------------------------------------------------------------------------------------

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

    # ---- outliving -------------------------------------------------------------------------------------------------

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

    # ---- rendezvous ------------------------------------------------------------------------------------------------

    @story
    async def test_a_rendezvous_says_what_is_announced_and_nothing_else(self, world: World) -> None:
        world.lets_hosts_go = False
        run = world.run(FOR_EVER)
        for wanted in (
            Announcement(2, (("a", Gate.READY),)),
            Announcement(3, (("a", Gate.DEGRADED), ("b", Gate.READY))),
            Announcement(1),
        ):
            await world.announced(run, wanted)
        await world.do(lambda: world.runtime.end_rendezvous(run))
        await world.do(lambda: world.runtime.end_rendezvous(run))
        await world.without_rendezvous(run)

    # ---- logs ------------------------------------------------------------------------------------------------------

    @story
    async def test_the_log_is_read_from_its_end_and_from_its_beginning(self, world: World) -> None:
        run = world.run("for n in 1 2 3 4 5; do echo line $n; done")
        await world.launch(run, 0)
        await world.ended(run)
        await world.written_to_log(run, "line 5")
        assert (await world.runtime.tail(run, 0, 2)).lines == ("line 4", "line 5")
        everything = (await world.runtime.tail(run, 0, None)).lines
        assert everything[-5:] == ("line 1", "line 2", "line 3", "line 4", "line 5")

    @story
    async def test_a_log_is_followed_and_gone_on_with(self, world: World) -> None:
        run = world.run(f"echo one; while [ ! -e {world.files}/go ]; do sleep 0.02; done; echo two; {FOR_EVER}")
        await world.launch(run, 0)
        await world.running(run)
        cursor: str | None = None
        lines: list[str] = []
        async with aclosing(world.runtime.follow(run, 0, None)) as following:
            async for chunk in following:
                lines += chunk.lines
                cursor = chunk.cursor
                if "one" in lines and not chunk.lines:
                    break
        assert lines[-1] == "one"
        (world.files / "go").touch()
        async with aclosing(world.runtime.follow(run, 0, cursor)) as following:
            async for chunk in following:
                if chunk.lines:
                    assert chunk.lines == ("two",)
                    break

    # ---- what ranks give -------------------------------------------------------------------------------------------

    @story
    async def test_results_are_given_by_rank(self, world: World) -> None:
        run = world.run('[ $RANK = 0 ] && printf "zero" >"$BASILICA_RESULT_FILE"; true')
        await world.launch(run, 0, 1)
        await world.ended(run, 0)
        await world.ended(run, 1)
        assert await world.do(lambda: world.runtime.results(run)) == {0: b"zero"}
        await world.do(lambda: world.runtime.end_rendezvous(run))
        assert await world.do(lambda: world.runtime.results(run)) == {0: b"zero"}

    @story
    async def test_what_ranks_report_is_known_while_they_run_and_after_their_end(self, world: World) -> None:
        wait = f"import os, time\nwhile not os.path.exists({str(world.files / 'go')!r}): time.sleep(0.02)"
        run = world.run(reporting(f"for n in range(5): report(step=n, loss=5.0 - n)\n{wait}\nreport(step=9, loss=0.5)"))
        await world.launch(run, 0)
        await world.running(run)
        await world.reported(run, step=4)
        [before] = await world.series(run, points=5)
        assert [(point.step, point.mean) for point in before.points] == [(n, 5.0 - n) for n in range(5)]
        (world.files / "go").touch()
        await world.ended(run)
        for _ in range(2):
            [series] = await world.series(run, points=6)
            assert (series.rank, series.worker, series.metric) == (0, 0, "loss")
            assert [point.step for point in series.points] == [0, 1, 2, 3, 4, 9]
            report = (await world.do(lambda: world.runtime.reports(run)))[0]
            assert (report.step, report.values) == (9, {"loss": 0.5})
            await world.do(lambda: world.runtime.end_rendezvous(run))
            await world.without_rendezvous(run)

    @story
    async def test_a_series_goes_on_over_attempts_and_is_shown_as_it_is_asked_for(self, world: World) -> None:
        who = "a, r = int(os.environ['BASILICA_ATTEMPT']), int(os.environ['RANK'])"
        tell = "for n in range(10): report(step=10 * a + n, loss=n, lr=r)"
        run = world.run(reporting(f"import os\n{who}\n{tell}\nexit(3 if a == 0 else 0)"))
        await world.launch(run, 0, 1)
        await world.ended(run, 0)
        await world.ended(run, 1)
        await world.launch(run, 0, attempt=1)
        await world.ended(run, 0, 1)
        await world.do(lambda: world.runtime.end_rendezvous(run))
        found = await world.series(run)
        assert [(each.rank, each.metric) for each in found] == [(0, "loss"), (0, "lr"), (1, "loss"), (1, "lr")]
        assert [point.step for point in found[0].points] == list(range(20))
        assert [point.step for point in found[2].points] == list(range(10))
        [few] = await world.series(run, SeriesQuery(ranks=frozenset({0}), metrics=frozenset({"loss"}), points=4))
        assert [(p.step, p.mean, p.min, p.max, p.count) for p in few.points] == [
            (4, 2.0, 0.0, 4.0, 5),
            (9, 7.0, 5.0, 9.0, 5),
            (14, 2.0, 0.0, 4.0, 5),
            (19, 7.0, 5.0, 9.0, 5),
        ]
        moment = found[0].points[10].at
        late = await world.series(run, SeriesQuery(since=moment))
        assert [[p.step for p in each.points] for each in late] == [list(range(10, 20))] * 2

    # ---- what they run in ------------------------------------------------------------------------------------------

    @story
    async def test_an_archive_that_nobody_sent_is_not_there(self, world: World) -> None:
        assert not await world.runtime.has_archive("ada", "0" * 64)

    @story
    async def test_ranks_run_in_the_directory_that_was_sent(self, world: World) -> None:
        files = {"hello": "from afar\n", "tool": "#!/bin/sh\necho works", "sub/in": "x"}
        stored = await world.send("ada", packed(files))
        assert await world.runtime.has_archive("ada", stored.digest)
        assert not await world.runtime.has_archive("eve", stored.digest)
        run = world.run("cat hello; ./tool; ls; env | grep ARCHIVE; true", archive=stored.digest)
        await world.launch(run, 0, 1)
        for rank in range(2):
            assert (await world.ended(run, rank)).log_tail == ("from afar", "works", "hello", "sub", "tool")
        inside = world.run("cat in", "inside", archive=stored.digest, workdir="sub")
        await world.launch(inside, 0)
        assert (await world.ended(inside)).log_tail == ("x",)

    @story
    async def test_a_directory_may_be_sent_twice_and_its_files_are_as_the_last_attempt_left_them(
        self, world: World
    ) -> None:
        content = packed({f"file-{n}": random.Random(n).randbytes(300_000).hex() for n in range(6)})
        one, two = await asyncio.gather(world.send("ada", content), world.send("ada", content))
        assert one == two == await world.send("ada", content)
        assert one.bytes == len(content)
        run = world.run("cat mark; echo attempt $BASILICA_ATTEMPT >mark; exit 1", archive=one.digest)
        await world.launch(run, 0)
        await world.ended(run)
        await world.launch(run, 0, attempt=1)
        assert (await world.ended(run, 0, 1)).log_tail[-1] == "attempt 0"

    @story
    async def test_what_would_leave_its_directory_or_is_no_archive_is_refused(self, world: World) -> None:
        for content in (packed({"../out": "x"}), b"no archive"):
            with pytest.raises(ValidationError):
                await world.send("ada", content)

    @story
    async def test_old_archives_that_nobody_uses_are_forgotten(self, world: World) -> None:
        used, unused = await world.send("ada", packed({"a": "1"})), await world.send("ada", packed({"a": "2"}))
        others = await world.send("eve", packed({"a": "1"}))

        async def in_use() -> set[tuple[str, str]]:
            return {("ada", used.digest)}

        async def nobody_asks() -> set[tuple[str, str]]:
            raise AssertionError("nothing is old")

        assert await world.runtime.forget_archives(nobody_asks, time.time() - 3600) == []
        forgotten = await world.runtime.forget_archives(in_use, time.time() + 3600)
        assert sorted(forgotten) == sorted([unused.digest, others.digest])
        assert await world.runtime.has_archive("ada", used.digest)
        assert not await world.runtime.has_archive("ada", unused.digest)
        assert not await world.runtime.has_archive("eve", others.digest)
        run = world.run("cat a", archive=(await world.send("ada", packed({"a": "2"}))).digest)
        await world.launch(run, 0)
        assert (await world.ended(run)).log_tail == ("2",)

    # ---- commands beside ranks -------------------------------------------------------------------------------------

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

    # ---- removing --------------------------------------------------------------------------------------------------

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
