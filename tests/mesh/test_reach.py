"""Hosts that tell which of the others they reach, also through a rendezvous that was lost."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from basilica.rank.reachability import Reach, own_name
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import PAIRS

PATIENCE_S = 40.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Rendezvous:
    """One that begins anew each time, at the same address, as that of a pod without a disk does."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port, self._lives = folder, free_port(), 0
        self.endpoint = f"127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._lives += 1
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--data-dir", str(self._folder / str(self._lives))]
        self._process = subprocess.Popen([sys.executable, "-m", "basilica.rendezvous", *where])

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await true():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def hosts(endpoint: str, patience: float) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(Reach(name, "127.0.0.1", endpoint, patience).run()) for name in ("one", "two")]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def told(endpoint: str) -> dict[str, dict[str, str]]:
    keys = KeysClient(endpoint)
    try:
        found = await keys.get(PAIRS, recursive=True)
        return {key.removeprefix(f"{PAIRS}/"): json.loads(value) for key, value in found.leaves().items()}
    except NoAnswer:
        return {}
    finally:
        await keys.close()


async def both_tell(endpoint: str) -> None:
    async def whole() -> bool:
        return await told(endpoint) == {"one": {"two": ""}, "two": {"one": ""}}

    await until(whole)


def test_a_rendezvous_that_forgot_everything_is_told_again(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)

    async def story() -> None:
        rendezvous.start()
        async with hosts(rendezvous.endpoint, patience=60.0) as tasks:
            await both_tell(rendezvous.endpoint)
            for _ in range(2):
                rendezvous.kill()
                rendezvous.start()
                await both_tell(rendezvous.endpoint)
            assert not any(task.done() for task in tasks)

    try:
        asyncio.run(story())
    finally:
        rendezvous.kill()


@pytest.mark.parametrize(
    ("master", "rank", "host", "name"),
    [
        ("gpt-0.gpt", "0", "gpt-0", "gpt-0.gpt"),
        ("gpt-0.gpt", "3", "gpt-3", "gpt-3.gpt"),
        ("gpt-0.gpt", "3", "gpt-2", ""),  # not the machine that bears it
        ("gpt-0.gpt", "0", "somewhere", ""),
        ("127.0.0.1", "0", "127", ""),
        ("10.0.0.5", "0", "gpt-0", ""),
        ("", "0", "-0", ""),
        ("gpt-0.gpt", "", "gpt-", ""),
    ],
)
def test_a_host_has_the_name_that_others_use_if_it_bears_it(master: str, rank: str, host: str, name: str) -> None:
    assert own_name({"MASTER_ADDR": master, "BASILICA_RANK": rank}, host) == name


def test_who_cannot_resolve_a_name_does_not_reach_its_host(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)

    async def story() -> None:
        rendezvous.start()
        reaches = [
            Reach("one", "127.0.0.1", rendezvous.endpoint, name="localhost"),
            Reach("two", "127.0.0.1", rendezvous.endpoint, name="gpt-0.gpt.invalid"),
        ]
        tasks = [asyncio.create_task(reach.run()) for reach in reaches]

        async def one_complains() -> bool:
            problem = (await told(rendezvous.endpoint)).get("one", {}).get("two", "")
            return problem.startswith("cannot resolve the name gpt-0.gpt.invalid: ")

        await until(one_complains)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        asyncio.run(story())
    finally:
        rendezvous.kill()


def test_an_agent_that_is_alone_says_that_it_is_up(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)

    async def story() -> None:
        rendezvous.start()
        alone = asyncio.create_task(Reach("one", "127.0.0.1", rendezvous.endpoint).run())

        async def up() -> bool:
            return await told(rendezvous.endpoint) == {"one": {}}

        await until(up)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)

    try:
        asyncio.run(story())
    finally:
        rendezvous.kill()


def test_patience_begins_with_the_silence_and_not_with_the_last_change(tmp_path: Path) -> None:
    """Nothing changes for longer than the patience, and then the rendezvous is away for less than it."""
    rendezvous = Rendezvous(tmp_path)

    async def story() -> None:
        rendezvous.start()
        quick = 3.0
        async with hosts(rendezvous.endpoint, patience=quick) as tasks:
            await both_tell(rendezvous.endpoint)
            done, _ = await asyncio.wait(tasks, timeout=quick * 1.5)
            assert not done
            rendezvous.kill()
            done, _ = await asyncio.wait(tasks, timeout=quick * 0.3)
            assert not done
            done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
            assert len(done) == len(tasks)

    try:
        asyncio.run(story())
    finally:
        rendezvous.kill()
