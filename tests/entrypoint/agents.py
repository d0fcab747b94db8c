"""Agents of ranks as processes, and the rendezvous that they follow."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from basilica.machine.strays import kill, with_environment
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.orders import AttemptRecord, Order, attempt_key, load_record, order_key
from basilica.rendezvous.service import Service

NODE = "node-7"
PATIENCE_S = 30.0
FENCE = "0.1 1.5 0.5"  # heartbeat, fence, grace


@contextlib.asynccontextmanager
async def rendezvous(folder: Path, port: int) -> AsyncIterator[KeysClient]:
    service = Service(folder, "127.0.0.1")
    await service.start()
    client = KeysClient(f"127.0.0.1:{port}")
    try:
        await service.open("run", port)
        yield client
    finally:
        await client.close()
        await service.stop()


@contextlib.contextmanager
def agent(
    folder: Path, port: int, script: str | Sequence[str], fence: str = FENCE, **more: str
) -> "Iterator[subprocess.Popen[str]]":
    """An agent that runs the script, or a command, in an environment with `more` variables."""
    environment = {
        **os.environ,
        "BASILICA_DRIVEN": "1",
        "BASILICA_RANK": "0",
        "BASILICA_POD_UID": "pod-1",
        "BASILICA_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "BASILICA_TERMINATION_LOG": str(folder / "message"),
        "BASILICA_SCRATCH": str(folder),
        "BASILICA_FENCE": fence,
        "NODE_NAME": NODE,
        **more,
    }
    rank = ["/bin/sh", "-c", script] if isinstance(script, str) else script
    command = [sys.executable, "-m", "basilica.entrypoint", "--", *rank]
    process = subprocess.Popen(command, env=environment, stdout=-1, stderr=-2, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        while left := with_environment({f"BASILICA_SCRATCH={folder}".encode()}):  # it outlives an agent that is killed
            kill(left)


async def ordered(keys: KeysClient, attempt: int = 0) -> None:
    await keys.put(f"/basilica/mesh-ready/{NODE}", "")
    await keys.put(order_key(0), Order(attempt=attempt, run=True, world=1).dump())


async def record_when(keys: KeysClient, attempt: int, ended: bool) -> AttemptRecord:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(NoAnswer):
                found = load_record(str((await keys.get(attempt_key(0, attempt))).node.get("value", "")))
                if found is not None and found.started_at is not None and (found.ended is not None) == ended:
                    return found
            await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def pid_in(path: Path) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while not text_of(path).strip():
            await asyncio.sleep(0.02)
    return int(text_of(path))


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
