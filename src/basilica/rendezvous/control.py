"""Orders to a running rendezvous service, for the control plane."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from basilica.rendezvous.exchange import MAX_HEAD, Exchange, Message, NoAnswer, Streams
from basilica.rendezvous.service import RendezvousError, control_path

ANSWER_WITHIN_S = 10.0


class RendezvousControl:
    """Opens and closes keyspaces of the service in `data_dir`. The service may restart between two orders.

    `RendezvousError` is the service's refusal; `NoAnswer` means that it does not answer.
    """

    def __init__(self, data_dir: Path, timeout: float = ANSWER_WITHIN_S) -> None:
        self._data_dir, self._timeout = data_dir, timeout
        self._exchange = Exchange(self._connect, "rendezvous")

    async def _connect(self) -> Streams:
        with control_path(self._data_dir) as path:
            return await asyncio.open_unix_connection(path, limit=MAX_HEAD)

    async def disconnect(self) -> None:
        await self._exchange.close()

    async def open(self, name: str, port: int | None = None) -> int:
        """The port of the keyspace `name`, made if need be, on `port` if one is wished for. Repeatable."""
        return int((await self.about(name, port))["port"])

    async def about(self, name: str, port: int | None = None) -> dict[str, Any]:
        """The same, with all that the service knows of the keyspace."""
        answer = await self._ask("PUT", f"/keyspaces/{quote(name, safe='')}" + (f"?port={port}" if port else ""))
        about: dict[str, Any] = json.loads(answer.body)
        return about

    async def allow(self, uid: int) -> None:
        """Have processes of this user answered too."""
        await self._ask("PUT", f"/users/{uid}")

    async def acknowledge(self, name: str) -> None:
        """Say that whoever should know of the keyspace's fault does."""
        await self._ask("DELETE", f"/faults/{quote(name, safe='')}")

    async def close(self, name: str) -> bool:
        """End the keyspace `name` and forget its keys; False if it is not there."""
        try:
            await self._ask("DELETE", f"/keyspaces/{quote(name, safe='')}")
        except RendezvousError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def list(self) -> "list[dict[str, Any]]":
        """Name, port, whether it serves, and what became of keys that were lost."""
        answer: list[dict[str, Any]] = json.loads((await self._ask("GET", "/keyspaces")).body)
        return answer

    async def hold(self) -> None:
        """Have the service stay while this runs. Ends, with `NoAnswer`, when the service does."""
        await self._exchange.ask("GET", "/hold", within=None, repeatable=False)  # another service is another to hold
        raise NoAnswer("the service let go")

    async def leave(self) -> bool:
        """Have the service end now if nobody needs it. True if it is about to, False if it stays."""
        try:
            await self._exchange.ask("POST", "/leave", within=self._timeout, repeatable=False)
        except NoAnswer:
            return True
        return False

    async def _ask(self, method: str, target: str) -> Message:
        answer = await self._exchange.ask(method, target, within=self._timeout)
        if answer.status >= 400:
            raise RendezvousError(answer.status, answer.body.decode(errors="replace").strip())
        return answer
