"""The activity of a rank's program reaches the keyspace, and planned changes reach the program: real processes."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from basilica.core.ends import ENDED_BY_PLATFORM
from basilica.core.notices import Notice, NoticeKind
from basilica.core.seen import AnswerState
from basilica.machine.layout import Layout
from basilica.progress.published import PublishedActivity, activity_key, parse
from basilica.rank import activity_relay
from basilica.rank.activity_relay import ActivityRelay
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.names import NOTICE
from basilica.rendezvous.orders import Order, attempt_key, order_key
from tests.entrypoint.agents import PATIENCE_S, agent, ordered, record_when, rendezvous, text_of
from tests.rendezvous.harness import free_port

NO_FENCE = ""
JOURNAL = """
import os, sys, time
from basilica.rendezvous.torch_agent import Journal
journal = Journal()
journal.nproc = 1
def fail(kind="own", code=1, message="RuntimeError: nan", **more):
    exit = dict(round=1, worker=0, torch_rank=0, pid=1234567, code=code, memory_kills=0, kind=kind, message=message)
    journal.add("exit", **{**exit, "traceback": "Traceback ...", "seen_at": time.time(), **more})
"""
LISTENER = """
import os, signal, sys, time
import basilica
def asked(name):
    return os.path.exists(os.path.join(sys.argv[1], name))
def write(name, text):
    with open(os.path.join(sys.argv[1], name + ".part"), "w") as file:
        file.write(str(text))
    os.rename(file.name, os.path.join(sys.argv[1], name))
"""
TRAINS = """
signal.signal(signal.SIGTERM, lambda *_: (write("term", time.monotonic()), sys.exit(0)))
step = 0
while True:
    step += 1
    basilica.report(step=step)
    found = basilica.notice()
    if found is not None:
        write("told", f"{found.kind} {found.target} {found.seconds_left:.1f}")
        while not asked("save"):
            time.sleep(0.01)
        write("ready", time.monotonic())
        found.ready()
    time.sleep(0.01)
"""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def notice(number: int = 1, *, since: float, seconds: float = 60.0, kind: NoticeKind = NoticeKind.SCALE) -> str:
    found = Notice(number=number, kind=kind, since=since, until=since + seconds, reason="more ranks", target=4)
    return json.dumps({**{name: getattr(found, name) for name in Notice.__slots__}})


async def activity_when(keys: KeysClient, condition: Callable[[PublishedActivity], object]) -> PublishedActivity:
    last = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                last = parse(str((await keys.get(activity_key(0))).node.get("value", "")))
                if last is not None and condition(last):
                    return last
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"the last activity is {last}") from None


async def written(path: Path) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while not text_of(path):
            await asyncio.sleep(0.02)
    return text_of(path)


def listens(found: PublishedActivity) -> bool:
    return found.activity.answer is not None


def is_ready_for(number: int) -> Callable[[PublishedActivity], bool]:
    def condition(found: PublishedActivity) -> bool:
        answer = found.activity.answer
        return answer is not None and (answer.state, answer.number) == (AnswerState.READY, number)

    return condition


# ---- to the keyspace -------------------------------------------------------------------------------------------------


def test_the_workers_of_a_torchrun_agent_are_shown_with_their_failures_and_their_last_words(tmp_path: Path) -> None:
    code = f"""{JOURNAL}
journal.add("meeting")
journal.add("round", round=1, group_rank=0, agents=1, world=1, workers=[[0, 0, os.getpid()]])
print("loss is nan", flush=True)
fail()
print("the next round", flush=True)
fail("echo", message="Connection closed by peer")
time.sleep(1000)
"""

    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, python(code), NO_FENCE, BASILICA_DEPLOYMENT="run"):
            async with rendezvous(tmp_path / "keys", port) as keys:
                began = time.time()
                await ordered(keys)
                found = await activity_when(
                    keys, lambda each: each.activity.agent is not None and len(each.activity.agent.exits) == 2
                )
                seen = found.activity.agent
                assert seen is not None
                assert (found.attempt, seen.nproc, seen.round, seen.world) == (0, 1, 1, 1)
                assert seen.executing_since is not None
                assert began <= seen.executing_since <= time.time()
                own, echo = seen.exits
                assert (own.exit_code, own.reason, own.echo, own.message) == (1, "Error", False, "RuntimeError: nan")
                assert "loss is nan" in own.log_tail
                assert (echo.echo, echo.log_tail) == (True, ())
            async with rendezvous(tmp_path / "other", port) as keys:  # one that has lost all
                assert await activity_when(keys, bool) == found

    asyncio.run(story())


def test_the_last_of_an_attempt_is_published_before_its_end(tmp_path: Path) -> None:
    code = f"{JOURNAL}\nos.environ.pop('BASILICA_REPORT_BELL')\nfail(); journal.add('stopped'); sys.exit(3)"

    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, python(code), NO_FENCE, BASILICA_DEPLOYMENT="run"):
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                assert (await record_when(keys, 0, ended=True)).ended is not None
                found = parse(str((await keys.get(activity_key(0))).node["value"]))
                assert found is not None
                assert found.activity.agent is not None
                assert [exit.reason for exit in found.activity.agent.exits] == ["Error"]

    asyncio.run(story())


def test_a_rank_that_writes_nothing_costs_no_key(tmp_path: Path) -> None:
    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, "exit 3", NO_FENCE):
            async with rendezvous(tmp_path / "keys", port) as keys:
                for attempt in (0, 1):
                    await ordered(keys, attempt)
                    await record_when(keys, attempt, ended=True)
                assert (await keys.get(activity_key(0))).status == 404

    asyncio.run(story())


@pytest.mark.parametrize("event", ["reporting", "answer", "agent"])
def test_the_bell_makes_it_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    monkeypatch.setattr(activity_relay, "POLL_EVERY_S", 1000.0)
    act = {
        "reporting": "basilica.report(step=3)",
        "answer": "basilica.notice()",
        "agent": "from basilica.rendezvous.torch_agent import Journal; Journal().add('meeting')",
    }[event]

    async def story() -> None:
        layout, published = Layout(tmp_path), asyncio.Queue[str]()
        relay = ActivityRelay(0, "run", layout, lambda _, value: published.put_nowait(value), lambda: None)
        layout.reports("run").mkdir(parents=True)
        (tmp_path / "notice").write_bytes(bytes(4096))
        relay.begin(2, tuple)
        task = asyncio.create_task(relay.run())
        environment = {
            "BASILICA_REPORT_FILE": str(layout.reports("run") / "0.2"),
            "BASILICA_REPORT_BELL": relay.bell,
            "BASILICA_NOTICE_FILE": str(tmp_path / "notice"),
            "BASILICA_DEPLOYMENT": "run",
            "BASILICA_RANK": "0",
            "BASILICA_ATTEMPT": "2",
        }
        code = f"import basilica, time; {act}; time.sleep(1000)"
        rank = await asyncio.create_subprocess_exec(*python(code), env={**os.environ, **environment})
        try:
            async with asyncio.timeout(PATIENCE_S):
                found = parse(await published.get())
            assert found is not None
            assert found.attempt == 2
            parts = {"reporting": found.activity.progress, "answer": found.activity.answer}
            assert parts.get(event, found.activity.agent) is not None
        finally:
            rank.kill()
            await rank.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            relay.close()

    asyncio.run(story())


# ---- from the keyspace -----------------------------------------------------------------------------------------------


def test_a_listener_is_told_of_a_notice_and_answers(tmp_path: Path) -> None:
    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, python(LISTENER + TRAINS, tmp_path), NO_FENCE, BASILICA_DEPLOYMENT="run"):
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                found = await activity_when(keys, lambda each: listens(each) and each.activity.progress is not None)
                assert found.activity.answer is not None
                assert (found.activity.answer.state, found.activity.answer.number) == (AnswerState.LISTENING, 0)
                # The clock of this controller is two hours ahead: the time that is left counts.
                await keys.put(NOTICE, notice(7, since=time.time() + 7200.0, seconds=50.0))
                kind, target, left = (await written(tmp_path / "told")).split()
                assert (kind, target) == ("scale", "4")
                assert 50.0 - PATIENCE_S < float(left) <= 50.0
                (tmp_path / "save").touch()
                await activity_when(keys, is_ready_for(7))
                await keys.delete(NOTICE)
                await activity_when(keys, lambda each: listens(each) and not is_ready_for(7)(each))

    asyncio.run(story())


@pytest.mark.parametrize("with_journal", [False, True])
def test_a_signal_tells_who_trains_and_nobody_else(tmp_path: Path, with_journal: bool) -> None:
    """A torchrun agent has no handler for it, and would end."""
    worker = f"""{LISTENER}
signal.signal(signal.SIGUSR1, lambda *_: write("signalled", os.getpid()))
write("worker", os.getpid())
while True:
    time.sleep(0.01)
"""
    torchrun = f"""{JOURNAL}
import subprocess
worker = subprocess.Popen([sys.executable, "-c", {worker!r}, sys.argv[1]])
while not os.path.exists(sys.argv[1] + "/worker"):
    time.sleep(0.01)
journal.add("round", round=1, group_rank=0, agents=1, world=1, workers=[[0, 0, worker.pid]])
worker.wait()
"""

    async def story() -> None:
        port = free_port()
        command = python(torchrun if with_journal else worker, tmp_path)
        more = {"BASILICA_DEPLOYMENT": "run", "BASILICA_NOTICE_SIGNAL": "SIGUSR1"}
        with agent(tmp_path, port, command, NO_FENCE, **more):
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                pid = await written(tmp_path / "worker")
                if with_journal:
                    await activity_when(keys, lambda each: each.activity.agent is not None)
                else:
                    await record_when(keys, 0, ended=False)
                await keys.put(NOTICE, notice(1, since=time.time()))
                assert await written(tmp_path / "signalled") == pid
                assert (await record_when(keys, 0, ended=False)).ended is None

    asyncio.run(story())


# ---- the platform takes the place away -------------------------------------------------------------------------------


def test_a_rank_that_listens_is_told_before_it_gets_the_platforms_signal(tmp_path: Path) -> None:
    async def story() -> None:
        port = free_port()
        more = {"BASILICA_DEPLOYMENT": "run", "BASILICA_NOTICE_SECONDS": "60", "BASILICA_GRACE_SECONDS": "10"}
        command = python(LISTENER + TRAINS, tmp_path)
        with agent(tmp_path, port, command, NO_FENCE, **more) as process:
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                await activity_when(keys, listens)
                began = time.time()
                process.send_signal(signal.SIGTERM)
                found = await activity_when(keys, lambda each: each.leaving is not None)
                assert found.leaving is not None
                assert found.leaving.kind == "preemption"
                assert began + 60.0 - 2.0 <= found.leaving.until <= time.time() + 60.0 + 2.0
                await keys.put(NOTICE, notice(1, since=time.time(), kind=NoticeKind.PREEMPTION))
                assert (await written(tmp_path / "told")).startswith("preemption")
                (tmp_path / "save").touch()
                await activity_when(keys, is_ready_for(1))
                assert not (tmp_path / "term").exists()
                await keys.put(order_key(0), Order(attempt=0, run=False, grace=10.0).dump())
                ended = (await record_when(keys, 0, ended=True)).ended
                assert ended is not None
                assert (ended.reason, ended.by_platform, ended.stopped) == (ENDED_BY_PLATFORM, True, False)
                assert float(text_of(tmp_path / "ready")) < float(text_of(tmp_path / "term"))
            assert await asyncio.to_thread(process.wait, PATIENCE_S) != 0

    asyncio.run(story())


@pytest.mark.parametrize("signals", [1, 2])
def test_a_rank_that_is_not_ready_in_time_gets_the_signal_then(tmp_path: Path, signals: int) -> None:
    """A second signal ends the wait."""
    seconds = 1.5 if signals == 1 else 1000.0

    async def story() -> None:
        port = free_port()
        more = {"BASILICA_DEPLOYMENT": "run", "BASILICA_NOTICE_SECONDS": f"{seconds}"}
        with agent(tmp_path, port, python(LISTENER + TRAINS, tmp_path), NO_FENCE, **more) as process:
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                await activity_when(keys, listens)
                told_at = time.monotonic()
                process.send_signal(signal.SIGTERM)
                await activity_when(keys, lambda each: each.leaving is not None)
                if signals == 2:
                    process.send_signal(signal.SIGTERM)
                ended = (await record_when(keys, 0, ended=True)).ended
                assert ended is not None
                assert ended.by_platform
                if signals == 1:
                    assert float(text_of(tmp_path / "term")) - told_at >= seconds

    asyncio.run(story())


@pytest.mark.parametrize("deaf", [False, True])
def test_a_rank_that_does_not_listen_gets_the_signal_at_once(tmp_path: Path, deaf: bool) -> None:
    """One that does not heed it is killed when its grace is over."""
    trap = "trap '' TERM" if deaf else f"trap 'touch {tmp_path}/term; exit 0' TERM"

    async def story() -> None:
        port = free_port()
        script = f"{trap}; touch {tmp_path}/up; while :; do sleep 0.05; done"
        more = {"BASILICA_NOTICE_SECONDS": "1000", "BASILICA_GRACE_SECONDS": "0.5"}
        with agent(tmp_path, port, script, NO_FENCE, **more) as process:
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                await record_when(keys, 0, ended=False)
                async with asyncio.timeout(PATIENCE_S):
                    while not (tmp_path / "up").exists():
                        await asyncio.sleep(0.02)
                process.send_signal(signal.SIGTERM)
                ended = (await record_when(keys, 0, ended=True)).ended
                assert ended is not None
                assert (ended.by_platform, ended.signal) == (True, "SIGKILL" if deaf else None)
                assert (tmp_path / "term").exists() is not deaf
                assert (await keys.get(attempt_key(0, 0))).ok

    asyncio.run(story())
