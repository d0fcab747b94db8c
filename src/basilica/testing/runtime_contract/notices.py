"""What the programs of ranks are told of planned changes, and what is known of them: answers, steps, their workers."""

import sys
import time
from dataclasses import replace

from basilica.core.mesh import Announcement, Gate
from basilica.core.notices import Notice, NoticeKind
from basilica.core.seen import AnswerState, SeenRank
from basilica.core.spec import Exec
from basilica.ports import Run
from basilica.testing.runtime_contract.world import Opens, World, story

TRAINS = """
import os, signal, sys, time
import basilica
folder = sys.argv[1]
def asked(name):
    return os.path.exists(os.path.join(folder, name))
def write(name, text):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        file.write(str(text))
    os.rename(file.name, os.path.join(folder, name))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
"""
ANSWERS = """
while True:
    found = basilica.notice()
    if found is not None:
        write("told", f"{found.kind} {found.target} {0 < found.seconds_left <= 60} {found.reason}")
        if asked("save"):
            found.ready()
    time.sleep(0.01)
"""
STEPS = """
step = 10
while True:
    if step < 12 or asked("go"):
        basilica.report(step=step)
        step += 1
    time.sleep(0.05)
"""
WORKERS = """
from basilica.rendezvous.torch_agent import Journal
print("the last words", flush=True)
journal = Journal()
journal.nproc = 2
journal.add("meeting")
journal.add("round", round=1, group_rank=0, agents=1, world=2, workers=[[0, 0, 1000001], [1, 1, 1000002]])
exit = dict(round=1, pid=1000002, memory_kills=0, traceback="Traceback ...", seen_at=time.time())
journal.add("exit", worker=1, torch_rank=1, code=-9, kind="own", message="ValueError: seven", **exit)
while not asked("go"):
    time.sleep(0.02)
journal.add("stopped")
sys.exit(1)
"""


def training(world: World, code: str) -> Exec:
    """A Python program that knows the directory of the story's files."""
    return Exec((sys.executable, "-c", f"{TRAINS}{code}", str(world.files)))


def notice(number: int, **facts: object) -> Notice:
    now = time.time()
    first = Notice(number=number, kind=NoticeKind.SCALE, since=now, until=now + 60.0, reason="more ranks", target=4)
    return replace(first, **facts)  # type: ignore[arg-type]


class Notices(Opens):
    """What passes between planned changes and the programs of ranks."""

    async def _is(self, world: World, run: Run, state: AnswerState, number: int) -> SeenRank:
        def answers(seen: SeenRank) -> bool:
            return seen.answer is not None and (seen.answer.state, seen.answer.number) == (state, number)

        return await world.until(run, 0, 0, answers)

    @story
    async def test_a_rendezvous_says_which_change_is_planned(self, world: World) -> None:
        world.lets_hosts_go = False
        run = world.run(training(world, ANSWERS))
        planned = notice(1)
        for wanted in (
            Announcement(2, (("a", Gate.READY),), notice=planned),
            Announcement(2, (("a", Gate.READY),), 2, replace(planned, until=planned.until + 5.0)),
            Announcement(2, (), notice=notice(2, kind=NoticeKind.RESTART, target=None, step=7)),
            Announcement(2),
        ):
            await world.announced(run, wanted)

    @story
    async def test_a_program_is_told_of_a_planned_change_and_its_answer_comes_back(self, world: World) -> None:
        run = world.run(training(world, ANSWERS))
        await world.launch(run, 0)
        await self._is(world, run, AnswerState.LISTENING, 0)
        world.notice = notice(5)
        seen = await self._is(world, run, AnswerState.GIVEN, 5)
        assert seen.answer is not None
        assert abs(seen.answer.at - time.time()) < 60.0
        await world.written("told", "scale 4 True more ranks")
        (world.files / "save").touch()
        await self._is(world, run, AnswerState.READY, 5)
        world.notice = replace(notice(6), kind=NoticeKind.RESTART, target=None, reason="all ranks start again")
        await self._is(world, run, AnswerState.READY, 6)
        await world.written("told", "restart None True all ranks start again")
        world.notice = None
        await self._is(world, run, AnswerState.LISTENING, 6)

    @story
    async def test_a_program_that_reads_no_notices_is_not_said_to(self, world: World) -> None:
        run = world.run(training(world, STEPS))
        await world.launch(run, 0)
        await world.until(run, 0, 0, lambda seen: seen.progress is not None)
        world.notice = notice(1)
        for _ in range(3):
            seen = await world.until(run, 0, 0, lambda seen: seen.progress is not None)
            assert (seen.answer, seen.agent, seen.leaving) == (None, None, None)

    @story
    async def test_the_steps_of_a_program_are_known_from_its_first_one_on(self, world: World) -> None:
        run = world.run(training(world, STEPS))
        await world.launch(run, 0)
        running = await world.until(run, 0, 0, lambda seen: seen.progress is not None)
        assert running.progress is not None
        assert running.started_at is not None
        assert (running.progress.first_step, running.progress.step in (10, 11)) == (10, True)
        assert running.started_at - 1.0 <= running.progress.first_at <= running.progress.at <= time.time() + 1.0

    @story
    async def test_steps_are_read_anew_where_they_are_asked_for(self, world: World) -> None:
        run = replace(world.run(training(world, STEPS)), fresh_steps=frozenset({0}))
        await world.launch(run, 0)
        await world.until(run, 0, 0, lambda seen: seen.progress is not None and seen.progress.step == 11)
        (world.files / "go").touch()
        seen = await world.until(run, 0, 0, lambda seen: seen.progress is not None and seen.progress.step >= 30)
        assert seen.progress is not None
        assert seen.progress.first_step == 10
        assert seen.progress.step_seconds is not None
        assert 0.0 < seen.progress.step_seconds < 5.0

    @story
    async def test_the_workers_of_a_torchrun_agent_are_known_while_it_runs_and_after_its_end(
        self, world: World
    ) -> None:
        run = world.run(training(world, WORKERS))
        await world.launch(run, 0)

        def failed(seen: SeenRank) -> bool:
            return seen.agent is not None and len(seen.agent.exits) == 1

        running = await world.until(run, 0, 0, failed)
        agent = running.agent
        assert agent is not None
        assert (agent.nproc, agent.round, agent.world, agent.pids) == (2, 1, 2, (1000001, 1000002))
        assert agent.executing_since is not None
        [exit] = agent.exits
        assert (exit.worker, exit.torch_rank, exit.exit_code, exit.signal) == (1, 1, 137, "SIGKILL")
        assert (exit.message, exit.traceback, exit.echo) == ("ValueError: seven", "Traceback ...", False)
        assert exit.log_tail[-1:] == ("the last words",)
        assert abs(exit.at - time.time()) < 60.0
        (world.files / "go").touch()
        await world.ended(run)
        after = await world.until(run, 0, 0, failed)
        assert after.agent is not None
        assert after.agent.executing_since is None, "the last that it wrote is known with its end"
        assert after.agent.exits == agent.exits
