"""Each run's rendezvous: there before its ranks, outliving server and service, gone with the run."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from basilica.controller.loop import Controller
from basilica.core.deployment import Deployment
from basilica.core.mesh import Announcement, Gate
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from basilica.machine.clocks import SteadyClock
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.control import RendezvousControl
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.retries import opened
from basilica.runtimes.local.ports import ports_of
from basilica.stores.memory import MemoryStore
from tests.runtime_local.machine import PATIENCE_S, SLEEP, Machine, python

LOOK = python(
    "import json, os, urllib.request as u;"
    "e = os.environ; base = 'http://' + e['BASILICA_RDZV_ENDPOINT'] + '/v2/keys/basilica/';"
    "get = lambda key: json.load(u.urlopen(base + key))['node']['value'];"
    "print(get('world'), get('mesh-ready/' + e['NODE_NAME']))"
)


class Plane:
    """A controller on a machine. The store lives on when the controller does not."""

    def __init__(self, machine: Machine, store: MemoryStore) -> None:
        self.machine, self.store = machine, store

    async def deploy(self, program: Any, **spec: Any) -> str:
        run = Deployment(
            instance="train-x",
            user="ada",
            namespace="u-ada",
            version=0,
            spec=DeploymentSpec(name="train", program=program, **{"world": WorldSize(1, 1, 4), **spec}),
            status=DeploymentStatus(created_at=time.time()),
        )
        return (await self.store.create(run)).instance

    async def until(self, holds: Callable[[DeploymentStatus], bool]) -> Deployment:
        found = await self.store.get("train-x")
        async with asyncio.timeout(PATIENCE_S):
            while not holds(found.status):
                found = await self.store.wait_change("train-x", found.version, PATIENCE_S) or found
        return found

    async def keys(self) -> dict[str, str]:
        """What the run's keyspace holds of ours; waits until it answers."""
        port = ports_of(self.machine.layout.ports("train-x")).rendezvous
        client = KeysClient(f"127.0.0.1:{port}")
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        return (await client.get("/basilica", recursive=True)).leaves()
                    except NoAnswer:
                        await asyncio.sleep(0.02)
        finally:
            await client.close()

    async def until_keys_after_start(self) -> None:
        await self.until(lambda status: status.phase == "ready")
        await self.until_keys(says(1))

    async def until_keys(self, wanted: dict[str, str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.keys() != wanted:
                await asyncio.sleep(0.02)

    async def cancel(self) -> None:
        await self.store.change_spec("train-x", lambda d: d.spec.ended_by(Wanted.CANCEL))
        await self.until(lambda status: status.settled)

    async def open_keyspaces(self) -> list[str]:
        control = RendezvousControl(self.machine.layout.rendezvous)
        try:
            return [row["name"] for row in await control.list()]
        finally:
            await control.disconnect()

    async def until_open(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(NoAnswer):  # the service is just being started
                    if await self.open_keyspaces() == list(names):
                        return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def plane(machine: Machine, store: MemoryStore) -> AsyncIterator[Plane]:
    async with machine.control_plane(node="here") as runtime:
        await runtime.close()  # the controller starts it itself
        controller = Controller(store, runtime, SteadyClock())
        await controller.start()
        try:
            yield Plane(machine, store)
        finally:
            await controller.close()


def says(world: int) -> dict[str, str]:
    return {"/basilica/world": json.dumps({"target": world}), "/basilica/mesh-ready/here": "ready"}


@pytest.mark.parametrize("backend", ["etcd-v2", "c10d", "static"])
async def test_a_rank_finds_world_and_gate_when_it_starts(machine: Machine, backend: str) -> None:
    async with plane(machine, MemoryStore()) as control:
        instance = await control.deploy(LOOK, rendezvous_backend=backend)
        run = await control.until(lambda status: status.settled)
        assert run.status.phase == "succeeded"
        lines = (await machine.runtime.tail(machine.run(LOOK), 0, None)).lines
        assert lines == ('{"target": 1} ready',)
        assert run.status.rendezvous_endpoint.startswith("127.0.0.1:")
        await control.until_open()
        assert instance == "train-x"


async def test_a_killed_service_comes_back_with_all_keys_at_the_same_port(machine: Machine) -> None:
    async with plane(machine, MemoryStore()) as control:
        await control.deploy(SLEEP)
        await control.until_keys_after_start()
        client = KeysClient(f"127.0.0.1:{ports_of(machine.layout.ports('train-x')).rendezvous}")
        assert (await client.put("/mine", "precious")).ok
        killed = machine.rendezvous_pid()
        os.kill(killed, signal.SIGKILL)
        assert await control.keys() == says(1)
        assert (await client.get("/mine")).node["value"] == "precious"
        await client.close()
        assert machine.rendezvous_pid() != killed
        await control.store.change_spec("train-x", lambda d: d.spec.scaled(3))
        await control.until_keys(says(3))
        await control.cancel()


async def test_keys_that_were_lost_are_written_again_at_the_same_port(machine: Machine) -> None:
    async with plane(machine, MemoryStore()) as control:
        await control.deploy(SLEEP)
        await control.until_keys_after_start()
        port = ports_of(machine.layout.ports("train-x")).rendezvous
        shutil.rmtree(machine.layout.rendezvous / "keyspaces")
        os.kill(machine.rendezvous_pid(), signal.SIGKILL)
        await control.until_keys(says(1))
        assert ports_of(machine.layout.ports("train-x")).rendezvous == port
        await control.cancel()


@pytest.mark.parametrize("file", ["about", "journal"])
async def test_a_damaged_keyspace_is_said_again_at_its_port_with_a_warning(machine: Machine, file: str) -> None:
    async with plane(machine, MemoryStore()) as here:
        await here.deploy(SLEEP)
        await here.until_keys_after_start()
        port = ports_of(machine.layout.ports("train-x")).rendezvous
        path = machine.layout.rendezvous / "keyspaces" / "train-x" / file
        path.unlink()
        os.mkfifo(path)
        os.kill(int((machine.layout.rendezvous / "lock").read_text()), signal.SIGKILL)
        run = await here.until(lambda status: "RendezvousKeysLost" in status.warned)
        await here.until_keys(says(1))
        assert ports_of(machine.layout.ports("train-x")).rendezvous == port
        [event] = [e for e in await here.store.events("train-x") if e.reason == "RendezvousKeysLost"]
        assert event.kind == "Warning"
        assert "the keys of train-x were lost" in event.message
        assert run.status.phase == "ready"
        await here.cancel()


CHANGES: dict[str, Callable[[KeysClient], Awaitable[Any]]] = {
    "the world is deleted": lambda keys: keys.delete("/basilica/world"),
    "the world is another": lambda keys: keys.put("/basilica/world", '{"target": 7}'),
    "the world is no JSON": lambda keys: keys.put("/basilica/world", "[[["),
    "all is deleted": lambda keys: keys.delete("/basilica", recursive=True),
    "the gate is deleted": lambda keys: keys.delete("/basilica/mesh-ready/here"),
    "a host is let go that is none": lambda keys: keys.put("/basilica/mesh-degraded/there", "degraded"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_a_rank_changes_of_ours_is_put_right(machine: Machine, change: str) -> None:
    """Nothing but the change itself wakes the controller here."""
    async with plane(machine, MemoryStore()) as here:
        await here.deploy(SLEEP)
        await here.until_keys_after_start()
        port = ports_of(machine.layout.ports("train-x")).rendezvous
        async with opened(f"127.0.0.1:{port}") as keys:
            for _ in range(2):
                assert (await CHANGES[change](keys)).ok
                await here.until_keys(says(1))
        await here.cancel()


@pytest.mark.parametrize("obstacle", ["/basilica", "/basilica/mesh-ready", "/basilica/world/x", "/basilica/world"])
async def test_nor_can_a_rank_stand_in_the_way_of_what_we_say(machine: Machine, obstacle: str) -> None:
    async with plane(machine, MemoryStore()) as here:
        await here.deploy(SLEEP)
        await here.until_keys_after_start()
        port = ports_of(machine.layout.ports("train-x")).rendezvous
        async with opened(f"127.0.0.1:{port}") as keys:
            await keys.delete("/basilica", recursive=True)
            await keys.put(obstacle, "in the way")
            await here.until_keys(says(1))
        await here.cancel()


async def test_it_outlives_the_server_and_the_next_one_goes_on_with_it(machine: Machine) -> None:
    store = MemoryStore()
    async with plane(machine, store) as control:
        await control.deploy(SLEEP)
        await control.until_keys_after_start()
        pid = machine.rendezvous_pid()
    assert await control.keys() == says(1)
    async with plane(machine, store) as control:
        await control.store.change_spec("train-x", lambda d: d.spec.scaled(2))
        await control.until_keys(says(2))
        assert machine.rendezvous_pid() == pid
        await control.cancel()
        await control.until_open()


async def test_a_keyspace_whose_run_ended_while_nobody_looked_is_closed_by_the_next_server(machine: Machine) -> None:
    store = MemoryStore()
    async with plane(machine, store) as control:
        await control.deploy(SLEEP)
        await control.until_keys_after_start()
        await control.cancel()
        await control.until_open()
        await machine.runtime._rendezvous.open("train-x")  # as if its end had been lost with a server
        await machine.runtime._rendezvous.open("stranger-x")  # as if its run had been removed
        machine.runtime._rendezvous._open.clear()
    async with plane(machine, store) as control:
        await control.until_open()


async def test_what_is_announced_replaces_what_was(machine: Machine) -> None:
    async with machine.control_plane(node="here") as runtime:
        run = machine.run(SLEEP)
        control = Plane(machine, MemoryStore())
        both = (("a", Gate.DEGRADED), ("b", Gate.READY))
        await runtime.announce(run, Announcement(2, both))
        expected = {"/basilica/world": '{"target": 2}', "/basilica/mesh-degraded/a": "degraded"}
        assert await control.keys() == expected | {"/basilica/mesh-ready/b": "ready"}
        await runtime.announce(run, Announcement(1, (("a", Gate.READY),)))
        assert await control.keys() == {"/basilica/world": '{"target": 1}', "/basilica/mesh-ready/a": "ready"}
        await runtime.end_rendezvous(run)
        await runtime.end_rendezvous(run)


async def test_a_service_that_cannot_be_started_is_said_and_stops_no_rank_from_ending(machine: Machine) -> None:
    store = MemoryStore()
    async with plane(machine, store) as control:
        await control.deploy(SLEEP)
        await control.until_keys_after_start()
        shutil.rmtree(machine.layout.rendezvous)
        machine.layout.rendezvous.write_text("in the way")
        await control.cancel()
