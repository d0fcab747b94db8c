"""An agent that is cut off stops its rank, in time, and only then: real processes, a real rendezvous that goes away."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from basilica.core.fencing import BEATS_PER_SECOND, Fence, FenceTimes
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.exchange import NoAnswer
from tests.entrypoint.agents import PATIENCE_S, agent, is_alive, ordered, pid_in, record_when, rendezvous, text_of
from tests.rendezvous.harness import free_port


@pytest.mark.parametrize("deaf", ["", "trap '' TERM; "])
def test_a_rank_whose_agent_is_cut_off_ends_within_the_fence(tmp_path: Path, deaf: str) -> None:
    script = f"{deaf}echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"

    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, script):
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                await record_when(keys, 0, ended=False)
                pid = await pid_in(tmp_path / "pid")
            async with asyncio.timeout(PATIENCE_S):
                while is_alive(pid):
                    await asyncio.sleep(0.01)
            async with rendezvous(tmp_path / "keys", port) as keys:
                record = await record_when(keys, 0, ended=True)
                assert record.ended is not None
                assert (record.ended.reason, record.ended.by_platform, record.ended.stopped) == ("Fenced", True, False)
                assert "has not answered for" in record.ended.log_tail[-1]
                message = json.loads(text_of(tmp_path / "message"))
                assert message["record"]["ended"]["reason"] == "Fenced"
                await ordered(keys, 1)  # and the pod is there for the next attempt
                await record_when(keys, 1, ended=False)

    asyncio.run(story())


def test_a_rendezvous_that_comes_back_in_time_stops_nobody(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"

    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, script, fence="0.1 8 1"):
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                await record_when(keys, 0, ended=False)
                pid = await pid_in(tmp_path / "pid")
            for restart in range(3):
                await asyncio.sleep(0.5)
                folder = tmp_path / (f"keys-{restart}" if restart else "keys")  # also one that has lost all
                async with rendezvous(folder, port) as keys:
                    assert (await record_when(keys, 0, ended=False)).pod == "pod-1"
                    await heard(keys)
            assert is_alive(pid)

    asyncio.run(story())


async def heard(keys: KeysClient) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await keys.get("/basilica/heard/pod-1")).ok:
            await asyncio.sleep(0.02)
    return str(found.node["value"])


def test_a_rendezvous_that_is_new_learns_for_how_long_there_was_none(tmp_path: Path) -> None:
    async def story() -> None:
        port = free_port()
        with agent(tmp_path, port, "sleep 1000", fence="0.1 20 1"):
            async with rendezvous(tmp_path / "keys", port) as keys:
                await ordered(keys)
                await record_when(keys, 0, ended=False)
                assert json.loads(await heard(keys)) == {"gap": None}
            gone_at = time.monotonic()
            await asyncio.sleep(0.7)
            async with rendezvous(tmp_path / "other", port) as keys:
                gap = json.loads(await heard(keys))["gap"]
                assert 0.5 <= gap <= time.monotonic() - gone_at + 0.2

    asyncio.run(story())


def started(port: int, folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "basilica.rendezvous", "--port", str(port), "--data-dir", str(folder)]
    )


def test_an_agent_whose_network_swallows_everything_stops_its_rank(tmp_path: Path) -> None:
    """A cut cable resets no connection: the rendezvous is stopped, and neither answers nor refuses."""
    script = f"echo $$ > {tmp_path}/pid; exec sleep 1000"

    async def story() -> None:
        port = free_port()
        service = started(port, tmp_path / "k")
        keys = KeysClient(f"127.0.0.1:{port}")
        try:
            with agent(tmp_path, port, script):
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        with contextlib.suppress(NoAnswer):
                            await ordered(keys)
                            break
                        await asyncio.sleep(0.05)
                await record_when(keys, 0, ended=False)
                pid = await pid_in(tmp_path / "pid")
                service.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(PATIENCE_S):
                    while is_alive(pid):
                        await asyncio.sleep(0.02)
                service.send_signal(signal.SIGCONT)
                record = await record_when(keys, 0, ended=True)
                assert record.ended is not None
                assert record.ended.reason == "Fenced"
        finally:
            await keys.close()
            service.kill()
            service.wait()

    asyncio.run(story())


# ---- the times -------------------------------------------------------------------------------------------------------


def test_a_rank_has_ended_before_it_is_replaced_and_a_rendezvous_that_moves_stops_nobody() -> None:
    times = FenceTimes()
    assert times.rendezvous_back < times.fence_after
    assert times.fence_after + times.fence_grace < times.lost_after
    assert times.lost_after <= 100.0, "a lost node is recovered from in less than two minutes"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"fence_after": 60.0}, "only moves"),
        ({"margin": 0.0}, "needs time to end"),
        ({"fence_grace": 0.0}, "needs time to end"),
        ({"heartbeat": 0.0}, "only moves"),
        ({"heartbeat": 40.0}, "only moves"),
    ],
)
def test_times_that_keep_no_order_are_refused(wrong: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        FenceTimes(**wrong)


@pytest.mark.parametrize("world", [1, 2, 512, 4096, 100_000])
def test_heartbeats_of_a_large_world_are_bounded(world: int) -> None:
    times = FenceTimes()
    every = times.heartbeat_every(world)
    assert times.heartbeat <= every <= times.fence_after / 4
    assert world / every <= BEATS_PER_SECOND or every == times.fence_after / 4
    fence = Fence.of(times.for_agents(world))
    assert fence is not None
    assert (fence.heartbeat, fence.fence_after, fence.grace) == (every, times.fence_after, times.fence_grace)


@pytest.mark.parametrize("text", ["", "1 2", "a b c", "5 4 1", "0 10 1", "1 10 0", "nan 1 1"])
def test_an_agent_that_was_told_no_times_fences_nobody(text: str) -> None:
    assert Fence.of(text) is None


def test_the_fence_counts_from_the_last_heartbeat_that_was_answered() -> None:
    fence = Fence(5.0, 75.0, 10.0)
    assert not fence.closed(1e9), "nobody counts on it before the first answer"
    fence.answered(100.0)
    assert (fence.closed(174.9), fence.closed(175.0), fence.silence(130.0)) == (False, True, 30.0)
    fence.answered(90.0)  # an answer that was late says nothing newer
    assert fence.ends_at() == 175.0
    fence.answered(150.0)
    assert not fence.closed(175.0)
    fence.not_supported()
    assert not fence.closed(1e9)
