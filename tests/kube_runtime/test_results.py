"""What ranks returned, as the control plane reads it from their keyspace."""

import asyncio
import base64
from pathlib import Path

from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.names import RESULTS
from basilica.rendezvous.service import Service
from basilica.runtimes.kubernetes.keyspace import RunKeys


def test_a_copy_that_is_behind_does_not_hide_a_result(tmp_path: Path) -> None:
    async def story() -> None:
        service = Service(tmp_path, "127.0.0.1")
        await service.start()
        try:
            endpoint = f"127.0.0.1:{await service.open('run', None)}"
            keys, writer = RunKeys(endpoint, "run", lambda: None), KeysClient(endpoint)
            await writer.put(f"{RESULTS}/1", base64.b64encode(b"done").decode())
            assert await keys.results() == {1: b"done"}  # at once, whatever its copy has heard of
            await writer.close()
            await keys.close()
        finally:
            await service.stop()

    asyncio.run(story())
