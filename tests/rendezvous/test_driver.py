"""The driver on real servers: what it writes, what it costs, and what it lives through."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from basilica.rendezvous import driver as driver_module
from basilica.rendezvous import elastic
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.driver import Driver
from basilica.rendezvous.elastic import parse_round
from basilica.rendezvous.http import Call, LongReply, Reply
from basilica.rendezvous.introductions import introduced
from basilica.rendezvous.names import WORLD
from tests.rendezvous.harness import OurServer, free_port, service_process
from tests.rendezvous.test_elastic import CLOSED, FINAL, FROZEN, JOINABLE, SETUP, final

RUNS = iter(range(1 << 30))


@pytest.fixture(params=["ours", "etcd"])
def endpoint(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue(request.param)
    host, port = server.address if request.param == "ours" else server
    return f"{host}:{port}"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[OurServer]:
    """A server that nobody else is connected to."""
    server = OurServer(tmp_path)
    server.fresh(3)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def ample_time_to_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a busy machine does not take a frozen round from under a test."""
    monkeypatch.setattr(elastic, "CONFIRM_S", 60.0)


class Keyspace:
    """One run's keys, as agents and the control plane write them."""

    def __init__(self, endpoint: str) -> None:
        self.run_id = f"r{next(RUNS)}"
        self.client = KeysClient(endpoint)
        self.active = f"/torchelastic/p2p/run_{self.run_id}/rdzv/active_version"

    async def want(self, target: object) -> None:
        assert (await self.client.put(WORLD, json.dumps({"target": target}))).ok

    async def state(self, text: str, *, counter: str = "1") -> None:
        """What agents would have written."""
        assert (await self.client.put(self.active.replace("active_version", "version_counter"), counter)).ok
        assert (await self.client.put(self.active, text)).ok

    async def read(self) -> dict[str, Any]:
        answer = await self.client.get(self.active)
        value: dict[str, Any] = json.loads(answer.node["value"]) if answer.ok else {}
        return value

    async def until(self, **wanted: object) -> dict[str, Any]:
        found: dict[str, Any] = await until(self.read, lambda state: wanted.items() <= state.items())
        return found


async def until(read: Callable[[], Awaitable[Any]], good: Callable[[Any], bool], patience: float = 20.0) -> Any:
    deadline = time.monotonic() + patience
    while not good(seen := await read()):
        assert time.monotonic() < deadline, f"still {seen!r} after {patience} s"
        await asyncio.sleep(0.01)
    return seen


@asynccontextmanager
async def driving(endpoint: str, run_id: str) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(Driver(endpoint, run_id).run())
    try:
        yield task
        assert not task.done(), "the driver ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def a_run(endpoint: str) -> AsyncIterator[Keyspace]:
    keys = Keyspace(endpoint)
    await keys.client.delete(WORLD)
    async with driving(endpoint, keys.run_id):
        yield keys
    await keys.client.close()


def test_every_decision_is_carried_out(endpoint: str) -> None:
    async def story() -> None:
        async with a_run(endpoint) as keys:
            await keys.want(2)
            await keys.state(JOINABLE)
            await keys.until(status="frozen", keep_alives=[])
            assert (await keys.client.get(keys.active)).node["ttl"] in range(1, 11)

            await keys.state(final(3))
            await keys.until(status="final", num_workers_waiting=1, basilica={"nudged": 1})
            assert "ttl" not in (await keys.client.get(keys.active)).node
            await keys.state(final(3, waiting=3, basilica={"nudged": 1}), counter="41")
            await keys.until(status="joinable", version="42", participants=[])
            counter = await keys.client.get(keys.active.replace("active_version", "version_counter"))
            assert counter.node["value"] == "42"

            await keys.state(CLOSED)
            await keys.until(status="final", version="1")
            await keys.state('{"status": "closed"}')
            await keys.until(status="joinable", version="2")

    asyncio.run(story())


def test_a_round_that_nobody_confirms_gives_way_to_the_next(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "CONFIRM_S", 0.2)

    async def story() -> None:
        async with a_run(endpoint) as keys:
            await keys.want(2)
            await keys.state(FROZEN)
            await keys.until(status="joinable", version="2")

    asyncio.run(story())


def test_a_member_that_is_gone_is_taken_out_of_its_round(endpoint: str) -> None:
    async def story() -> None:
        async with a_run(endpoint) as keys:
            here, gone = (keys.active.replace("active_version", f"v_1/rank_{n}") for n in range(2))
            await keys.client.put(here, "", ttl=60)
            await keys.client.put(gone, "", ttl=60)
            await keys.want(2)
            await keys.state(json.dumps(json.loads(FINAL) | {"keep_alives": [here, gone]}))
            await keys.client.delete(gone)
            await keys.until(status="final", keep_alives=[here], participants=[0, 1])
            await keys.client.delete(here)  # nobody is left: agents destroy such a round at once
            await keys.want(3)
            await keys.state(final(3, waiting=3))
            await keys.until(status="joinable")

    asyncio.run(story())


def test_what_lost_members_did_not_say_is_said_once_somebody_waits(endpoint: str) -> None:
    async def story() -> None:
        async with a_run(endpoint) as keys:
            store = keys.active.replace("active_version", "v_1/kv")
            role = b64encode(b"torchelastic/role_info/0").decode()
            await keys.want(2)
            await keys.state(final(2))
            said = b64encode(b'{"role": "default", "rank": 0, "local_world_size": 3}').decode()
            assert (await keys.client.put(f"{store}/{role}", said)).ok
            await keys.want(3)  # a driver that spoke too early would have done so by the time that it sees this
            await keys.state(final(2, waiting=1))

            async def words() -> dict[str, str]:
                return (await keys.client.get(store)).leaves()

            told = await until(words, lambda told: introduced(store, told, 2))
            assert told[f"{store}/{role}"] == said
            second = b64decode(told[f"{store}/{b64encode(b'torchelastic/assigned_ranks/1').decode()}"])
            assert json.loads(second) == [3, 6, 3, 6]
            await keys.state(final(2, waiting=3))
            await keys.until(status="joinable", version="2")  # and the rest goes on

    asyncio.run(story())


def test_nothing_is_said_for_the_members_of_a_round_that_trains(endpoint: str) -> None:
    async def story() -> None:
        async with a_run(endpoint) as keys:
            store = keys.active.replace("active_version", "v_1/kv")
            await keys.want(2)
            await keys.state(FINAL)
            await keys.state(final(3))
            await keys.until(num_workers_waiting=1)  # so all before was seen
            await keys.client.delete(store, recursive=True)
            await keys.state(FINAL)
            await keys.state(JOINABLE)
            await keys.until(status="frozen")
            assert (await keys.client.get(store)).status == 404

    asyncio.run(story())


def test_a_new_target_counts_at_once(endpoint: str) -> None:
    async def story() -> None:
        async with a_run(endpoint) as keys:
            await keys.state(JOINABLE)
            await keys.want(3)
            await keys.want(2)
            await keys.until(status="frozen")

    asyncio.run(story())


def test_without_a_target_nothing_is_touched(endpoint: str) -> None:
    async def story() -> None:
        async with a_run(endpoint) as keys:
            await keys.state(CLOSED)
            await keys.want(0)  # a driver that had seen only the state would have opened it by now
            await keys.state(JOINABLE)
            await keys.want(2)
            await keys.until(status="frozen")

    asyncio.run(story())


@pytest.mark.parametrize("text", ["nonsense", '{"status": "thawed"}', JOINABLE.replace("}", ', "generation": 4}')])
def test_what_is_not_understood_is_left_alone_and_said_once(
    ours: OurServer, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        endpoint = "{}:{}".format(*ours.address)
        async with a_run(endpoint) as keys:
            await keys.want(1)
            await keys.state(text)
            await keys.state(text)
            await until(_count(caplog), lambda count: count == 1)
            assert (await keys.client.get(keys.active)).node["value"] == text
            await keys.state(JOINABLE)
            await keys.until(status="frozen")  # and the rest goes on

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert len(caplog.records) == 1
    assert "is left alone" in caplog.text


def _count(caplog: pytest.LogCaptureFixture) -> Callable[[], Awaitable[int]]:
    async def count() -> int:
        return len(caplog.records)

    return count


def test_at_rest_it_holds_one_connection_and_keep_alives_do_not_wake_it(own: OurServer) -> None:
    asked: list[str] = []
    assert own.server is not None
    handle = own.server.handle

    def counting(call: Call) -> Reply | LongReply:
        asked.append(call.path)
        return handle(call)

    async def story() -> None:
        endpoint = "{}:{}".format(*own.address)
        agent = KeysClient(endpoint)
        async with a_run(endpoint) as keys:
            await keys.want(2)
            await keys.state(FINAL)
            lease = keys.active.replace("active_version", "v_1/rank_0")
            await agent.put(lease, "", ttl=10)
            assert own.server is not None
            await until(_watching(own), lambda count: count == 1)
            own.server.handle = counting  # type: ignore[method-assign]
            for _ in range(50):
                form = "ttl=10&refresh=true&prevExist=true"
                message = await agent._exchange.ask("PUT", f"/v2/keys{lease}", form, within=5)
                assert message.status == 200
            await agent.get("/")  # answered after all that came before
            assert len(asked) == 51
            assert len(own._lane.connections) == 3  # the agent, the control plane, the driver
        await agent.close()

    try:
        asyncio.run(story())
    finally:
        own.server.handle = handle  # type: ignore[method-assign]


def _watching(server: OurServer) -> Callable[[], Awaitable[int]]:
    async def watching() -> int:
        assert server.server is not None
        return server.server.keyspace.watching

    return watching


def test_a_service_that_is_killed_and_comes_back_is_driven_again(tmp_path: Path) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"

    async def story() -> None:
        keys = Keyspace(endpoint)
        async with driving(endpoint, keys.run_id):
            for _ in range(3):
                with service_process(tmp_path, "--port", str(port)) as process:
                    await keys.want(2)
                    await keys.state(JOINABLE)
                    await keys.until(status="frozen")
                    await keys.state(final(3))
                    await keys.until(num_workers_waiting=1)
                    process.kill()
                    process.wait()
        await keys.client.close()

    asyncio.run(story())


def test_a_driver_that_starts_late_finds_what_there_is_to_do(endpoint: str) -> None:
    async def story() -> None:
        keys = Keyspace(endpoint)
        await keys.want(2)
        await keys.state(final(3))
        async with driving(endpoint, keys.run_id):
            await keys.until(num_workers_waiting=1)
        # Ours is in the value itself: the next driver does not count it as an agent, nor nudge again.
        await keys.state(final(3, waiting=2, basilica={"nudged": 1}))
        async with driving(endpoint, keys.run_id):
            await keys.state(final(3, waiting=3, basilica={"nudged": 1}))
            await keys.until(status="joinable")
        await keys.client.close()

    asyncio.run(story())


def test_many_in_one_process_and_none_is_left(own: OurServer) -> None:
    async def story() -> None:
        endpoint = "{}:{}".format(*own.address)
        keys = [Keyspace(endpoint) for _ in range(300)]
        await keys[0].client.put(WORLD, json.dumps({"target": 2}))
        drivers = [asyncio.create_task(Driver(endpoint, k.run_id).run()) for k in keys]
        await until(_watching(own), lambda count: count == len(keys))
        for chosen in (keys[0], keys[150], keys[299]):
            await chosen.state(JOINABLE)
            await chosen.until(status="frozen")
        for task in drivers:
            task.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*drivers, return_exceptions=True)
        )
        await asyncio.gather(*(k.client.close() for k in keys))

        async def connections() -> int:
            return len(own._lane.connections)

        await until(connections, lambda count: count == 0)

    asyncio.run(story())


def test_more_events_than_etcd_remembers(endpoint: str) -> None:
    async def story() -> None:
        keys = Keyspace(endpoint)
        first = (await keys.client.put("/other", "0")).index
        for number in range(1100):
            await keys.client.put("/other", str(number))
        driver = Driver(endpoint, keys.run_id)
        await asyncio.wait_for(driver._change_after(first), 20)  # 401: look anew
        await driver._client.close()
        await keys.client.close()

    asyncio.run(story())


ETCD = b"X-Etcd-Index: 5\r\nContent-Type: application/json\r\n"
CROOKED = {
    "closes": b"",
    "no HTTP": b"\x00\xff\r\n\r\n",
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "no etcd": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "a page": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    "a list": b"HTTP/1.1 200 OK\r\n" + ETCD + b"Content-Length: 2\r\n\r\n[]",
    "no node": b"HTTP/1.1 200 OK\r\n" + ETCD + b"Content-Length: 2\r\n\r\n{}",
    "broken": b"HTTP/1.1 500 No\r\n" + ETCD + b'Content-Length: 17\r\n\r\n{"errorCode":300}',
    "cleared": b"HTTP/1.1 400 No\r\n" + ETCD + b'Content-Length: 17\r\n\r\n{"errorCode":401}',
    "an old event": b"HTTP/1.1 200 OK\r\n"
    + ETCD
    + b'Content-Length: 48\r\n\r\n{"node":{"key":"/other","modifiedIndex":5      }}',
    "huge": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    "endless": b"HTTP/1.1 200 OK\r\n" + b"a" * 100_000,
}


@pytest.mark.parametrize("answer", CROOKED.values(), ids=CROOKED.keys())
def test_a_crooked_server_is_asked_ever_more_seldom(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "AGAIN_MAX_S", 0.2)
    asked = 0

    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            while await reader.readline():
                while (await reader.readline()).strip():
                    pass
                asked += 1
                writer.write(answer)
                if answer in (CROOKED["closes"], CROOKED["half"], CROOKED["endless"]):
                    break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with driving(f"127.0.0.1:{port}", "r"):
            await asyncio.sleep(0.5)  # pauses of 0.1, 0.2, 0.2: without them it would be hundreds
        server.close()

    asyncio.run(story())
    assert 1 <= asked <= 20


TORCH = """
import json, sys, threading, urllib.request
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.etcd_rendezvous import create_rdzv_handler

endpoint, run_id = sys.argv[1:]
seen, root = [], f"http://{endpoint}/v2/keys/torchelastic/p2p/run_{run_id}/rdzv/active_version"

def read():
    with urllib.request.urlopen(f"http://{endpoint}/v2/keys/?recursive=true") as reply:
        index = int(reply.headers["X-Etcd-Index"])
    while True:
        with urllib.request.urlopen(f"{root}?wait=true&waitIndex={index + 1}") as reply:
            event = json.load(reply)
        index = event["node"]["modifiedIndex"]
        seen.append(event["node"].get("value"))
        if '"closed"' in str(seen[-1]):
            return

reader = threading.Thread(target=read)
reader.start()
parameters = RendezvousParameters("etcd", endpoint, run_id, 2, 3, last_call_timeout="1")
handlers = [create_rdzv_handler(parameters) for _ in range(3)]
pair = [threading.Thread(target=handler.next_rendezvous) for handler in handlers[:2]]
[each.start() for each in pair], [each.join() for each in pair]
threading.Thread(target=handlers[2].next_rendezvous, daemon=True).start()
while handlers[0].num_nodes_waiting() == 0:
    pass
handlers[1].shutdown()
reader.join()
print(json.dumps(seen), flush=True)
import os
os._exit(0)
"""


def test_every_state_that_the_installed_torch_writes_is_known(endpoint: str) -> None:
    """Without us, so that it is torch's own; what it writes is what `test_elastic` has pinned."""
    run_id = f"r{next(RUNS)}"
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", TORCH, endpoint, run_id],
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: list[str] = json.loads(done.stdout.splitlines()[-1])
    rounds = [parse_round(text) for text in seen]
    steps = list(dict.fromkeys((r.status, r.participants) for r in rounds))
    expected = [("setup", 0), ("joinable", 0), ("joinable", 1), ("joinable", 2), ("frozen", 2), ("final", 2)]
    assert steps == [*expected, ("closed", 2)]
    assert rounds[-1].waiting == 1
    written = [_in_order(text) for text in seen]
    pinned = [_in_order(text.replace("run_r/", f"run_{run_id}/")) for text in (SETUP, JOINABLE, FROZEN, FINAL)]
    for state in pinned:
        assert state in written
    assert written[-1] == pinned[-1] | {"status": "closed", "num_workers_waiting": 1}


def _in_order(text: str) -> dict[str, Any]:
    """Agents confirm in any order."""
    state: dict[str, Any] = json.loads(text)
    return state | {name: sorted(state[name]) for name in ("keep_alives",) if name in state}
