"""Orders to a running rendezvous service, for the control plane."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from basilica.rendezvous.service import RendezvousError, control_path


class RendezvousControl:
    """Opens and closes keyspaces of the service in `data_dir`. The service may restart between two orders.

    `RendezvousError` is the service's refusal; `httpx.TransportError` means that it does not answer.
    """

    def __init__(self, data_dir: Path, timeout: float = 10.0) -> None:
        self.data_dir, self.timeout = data_dir, timeout

    async def open(self, name: str, port: int | None = None) -> int:
        """The port of the keyspace `name`, made if need be, on `port` if one is wished for. Repeatable."""
        answer = await self._ask("PUT", f"/keyspaces/{quote(name, safe='')}", {"port": port} if port else {})
        return int(answer.json()["port"])

    async def close(self, name: str) -> bool:
        """End the keyspace `name` and forget its keys; False if it is not there."""
        try:
            await self._ask("DELETE", f"/keyspaces/{quote(name, safe='')}", {})
        except RendezvousError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def list(self) -> "list[dict[str, Any]]":
        """Name, port, whether it serves, and what is wrong if it does not."""
        answer: list[dict[str, Any]] = (await self._ask("GET", "/keyspaces", {})).json()
        return answer

    async def _ask(self, method: str, path: str, query: dict[str, int]) -> httpx.Response:
        if not self.data_dir.is_dir():
            raise httpx.ConnectError(f"no rendezvous service has run in {self.data_dir}")
        with control_path(self.data_dir) as uds:
            transport = httpx.AsyncHTTPTransport(uds=uds)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://rendezvous", timeout=self.timeout
            ) as client:
                answer = await client.request(method, path, params=query)
        if answer.status_code >= 400:
            raise RendezvousError(answer.status_code, answer.text.strip())
        return answer
