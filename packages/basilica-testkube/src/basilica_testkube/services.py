"""Services: an address for each, and connections to it carried to a running pod behind it.

There is no DNS. A Service of `clusterIP: None` has no address.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from basilica_testkube.kinds import PODS, SERVICES
from basilica_testkube.registry import Registry
from basilica_testkube.store import Change
from basilica_testkube.values import Json, is_deleting, labels_of, meta

_PIECE = 1 << 16


class ServiceProxy:
    """Listens on the loopback addresses of Services for as long as they are there."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._servers: dict[str, list[asyncio.Server]] = {}  # by the Service's uid
        self._openings: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        registry.store.listen(self._note)

    def _note(self, change: Change) -> None:
        if change.kind == SERVICES and change.type == "ADDED":
            self._servers[meta(change.obj)["uid"]] = []
            _keep(asyncio.get_running_loop().create_task(self._open(change.obj)), self._openings)
        elif change.kind == SERVICES and change.type == "DELETED":
            self._shut(meta(change.obj)["uid"])

    async def _open(self, service: Json) -> None:
        address = service["spec"].get("clusterIP")
        if address in (None, "", "None"):
            return
        for port in service["spec"].get("ports") or []:

            async def carry(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int = int(port["targetPort"])
            ) -> None:
                await self._carry(service, target, (reader, writer))

            server = await asyncio.start_server(carry, address, port["port"])
            if meta(service)["uid"] in self._servers:
                self._servers[meta(service)["uid"]].append(server)
            else:  # the Service was deleted meanwhile
                server.close()

    def _shut(self, uid: str) -> None:
        for server in self._servers.pop(uid, []):
            server.close()

    async def _carry(self, service: Json, port: int, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        task = asyncio.current_task()
        assert task is not None
        _keep(task, self._connections)
        with suppress(asyncio.CancelledError):  # by `close`
            await self._connect(self._pod_behind(service), port, client)

    async def _connect(
        self, pod: Json | None, port: int, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        try:
            if pod is None:
                return
            with suppress(OSError):
                to_pod = await asyncio.open_connection(pod["status"]["podIP"], port)
                try:
                    await _either(_pump(client[0], to_pod[1]), _pump(to_pod[0], client[1]))
                finally:
                    to_pod[1].close()
        finally:
            client[1].close()

    def _pod_behind(self, service: Json) -> Json | None:
        wanted = service["spec"].get("selector") or {}
        for pod in self._registry.store.items(PODS, meta(service)["namespace"]):
            running = pod["status"].get("phase") == "Running" and not is_deleting(pod)
            if wanted and running and wanted.items() <= labels_of(pod).items():
                return pod
        return None

    async def close(self) -> None:
        for uid in list(self._servers):
            self._shut(uid)
        await asyncio.gather(*self._openings, return_exceptions=True)  # one that is cancelled loses its open socket
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


def _keep(task: asyncio.Task[None], among: set[asyncio.Task[None]]) -> None:
    among.add(task)
    task.add_done_callback(among.discard)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()


async def _either(*pumps: Coroutine[Any, Any, None]) -> None:
    """Carry both ways until one side has ended."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
