"""The control plane's client of a running rendezvous service."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from basilica.rendezvous.exchange import MAX_HEAD, Exchange, Message, NoAnswer, Streams
from basilica.rendezvous.service import RendezvousError, control_path

ANSWER_WITHIN_S = 10.0


class RendezvousControl:
    """Opens and closes keyspaces of the service in `data_dir`. The service may restart between two requests.

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
        """Return the port of the keyspace `name`, created if need be, on `port` if one is given. Repeatable."""
        return int((await self.about(name, port))["port"])

    async def about(self, name: str, port: int | None = None) -> dict[str, Any]:
        """Do the same, and return all that the service knows of the keyspace."""
        answer = await self._ask("PUT", f"/keyspaces/{quote(name, safe='')}" + (f"?port={port}" if port else ""))
        about: dict[str, Any] = json.loads(answer.body)
        return about

    async def allow(self, uid: int) -> None:
        """Admit processes of this user too."""
        await self._ask("PUT", f"/users/{uid}")

    async def acknowledge(self, name: str) -> None:
        """Clear the keyspace's fault, which has reached those who should know of it."""
        await self._ask("DELETE", f"/faults/{quote(name, safe='')}")

    async def close(self, name: str) -> bool:
        """Delete the keyspace `name` with its keys; False if it is not there."""
        try:
            await self._ask("DELETE", f"/keyspaces/{quote(name, safe='')}")
        except RendezvousError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def list(self) -> "list[dict[str, Any]]":
        """Return name, port, whether it serves, and the fault (lost keys) of each keyspace."""
        answer: list[dict[str, Any]] = json.loads((await self._ask("GET", "/keyspaces")).body)
        return answer

    async def hold(self) -> None:
        """Keep the service alive while this runs. Ends, with `NoAnswer`, when the service does."""
        await self._exchange.ask("GET", "/hold", within=None, repeatable=False)  # a restarted service must be held anew
        raise NoAnswer("the service let go")

    async def leave(self) -> bool:
        """Ask the service to end now if it is unused. True if it is about to, False if it stays."""
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
