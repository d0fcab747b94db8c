"""What a driven entrypoint says of the gate in the log of its rank: nothing, unless somebody may wonder."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.orders import Order, order_key
from basilica.rendezvous.service import Service

NODE = "node-7"


def run_a_rank(folder: Path, keys: Mapping[str, str], **more: str) -> list[str]:
    """The log of a rank that ends by itself, in front of a rendezvous with these keys."""

    async def story() -> list[str]:
        service = Service(folder / "keys", "127.0.0.1")
        await service.start()
        try:
            endpoint = f"127.0.0.1:{await service.open('run', None)}"
            client = KeysClient(endpoint)
            for key, value in {order_key(0): Order(attempt=0, run=True, world=1).dump(), **keys}.items():
                await client.put(key, value)
            await client.close()
            driven = {"BASILICA_DRIVEN": "1", "BASILICA_RANK": "0", "BASILICA_RDZV_ENDPOINT": endpoint}
            files = {"BASILICA_TERMINATION_LOG": str(folder / "message"), "BASILICA_SCRATCH": str(folder)}
            environment = {**os.environ, **driven, **files, "NODE_NAME": NODE, **more}
            command = [sys.executable, "-m", "basilica.entrypoint", "--", "/bin/sh", "-c", "echo up"]
            done = await asyncio.to_thread(
                subprocess.run, command, env=environment, stdout=-1, stderr=-2, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout
            return str(done.stdout).splitlines()
        finally:
            await service.stop()

    return asyncio.run(story())


def test_nothing_is_said_of_a_gate_that_opens(tmp_path: Path) -> None:
    assert run_a_rank(tmp_path, {f"/basilica/mesh-ready/{NODE}": ""}) == ["up"]


@pytest.mark.parametrize(
    ("keys", "limit", "said"),
    [
        (
            {f"/basilica/mesh-degraded/{NODE}": ""},
            "60",
            "basilica: not all hosts reach each other: the rank starts all the same",
        ),
        ({}, "0.2", "basilica: within "),
    ],
)
def test_one_line_says_that_a_rank_starts_in_spite_of_it(
    tmp_path: Path, keys: Mapping[str, str], limit: str, said: str
) -> None:
    line, up = run_a_rank(tmp_path, keys, BASILICA_MESH_TIMEOUT=limit)
    assert line.startswith(said)
    assert up == "up"
