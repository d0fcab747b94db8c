"""Killed in the middle of writes, again and again; after each kill all that was acknowledged must be there.

Run as `python kill_writer.py STATE_FILE ROUNDS SEED`, so that a fork meets no other threads. It prints how many
writes were acknowledged, and fails with an assertion if one was lost.
"""

import asyncio
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

from basilica.core.events import Event
from basilica.core.phase import Phase
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.store_contract import CREATED, a_run

TASKS = 8


async def write_for_ever(path: Path, round: int, acknowledge: int) -> None:
    store = SqliteStore(path)
    await store.open()

    def told(instance: str, version: int, saves: int) -> None:
        os.write(acknowledge, f"{instance} {version} {saves}\n".encode())

    async def runs(task: int) -> None:
        for number in range(10**9):
            name = f"run-{round}-{task}-{number}"
            deployment = await store.create(a_run(name, name=name), [CREATED])
            told(name, deployment.version, 0)
            for saves in range(1, 4):
                status = replace(deployment.status, phase=Phase.READY, message=str(saves))
                deployment = await store.save_status(deployment, status, [Event("Saved", "again")], now=float(saves))
                told(name, deployment.version, saves)

    await asyncio.gather(*(runs(task) for task in range(TASKS)))


def killed_after(path: Path, round: int, acknowledgements: int) -> list[str]:
    """The lines that the writer had acknowledged when it died."""
    reading, writing = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(reading)
        asyncio.run(write_for_ever(path, round, writing))
    os.close(writing)
    with os.fdopen(reading) as lines:
        first = [line for line, _ in zip(lines, range(acknowledgements), strict=False)]
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        rest = list(lines)
    return [line for line in first + rest if line.endswith("\n")]


async def check(path: Path, acknowledged: dict[str, tuple[int, int]]) -> None:
    store = SqliteStore(path)
    await store.open()
    found = {d.instance: d for d in await store.deployments()}
    for instance, (version, saves) in acknowledged.items():
        assert found[instance].version >= version, instance
        assert int(found[instance].status.message or 0) >= saves, instance
    for instance, deployment in found.items():
        counts = {event.reason: event.count for event in await store.events(instance)}
        assert counts.pop("Created") == 1, instance
        assert counts.get("Saved", 0) == int(deployment.status.message or 0), instance
    assert len(await store.usage("ann")) == len(found)
    assert await store.live() == list(reversed(found))
    newest = max((d.version for d in found.values()), default=0)
    assert (await store.create(a_run(f"after-{newest}", name=f"after-{newest}"), [CREATED])).version > newest
    await store.close()


def main(path: Path, rounds: int, seed: int) -> None:
    acknowledged: dict[str, tuple[int, int]] = {}
    chance = random.Random(seed)
    for round in range(rounds):
        for line in killed_after(path, round, chance.randrange(1, 150)):
            instance, version, saves = line.split()
            acknowledged[instance] = (int(version), int(saves))
        asyncio.run(check(path, acknowledged))
    print(len(acknowledged))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
