"""A client of the etcd v2 keys API, for the control plane. Stdlib only: it also runs in images that are not ours.

A wait holds the client's connection until its event comes, so waiting is done with a client of its own.
"""

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from basilica.rendezvous.exchange import MAX_HEAD, Exchange, NoAnswer, Streams

ANSWER_WITHIN_S = 10.0
KEEPALIVE_AFTER_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 5, 2, 3
NOTICED_AFTER_S = KEEPALIVE_AFTER_S + KEEPALIVE_EVERY_S * KEEPALIVE_COUNT
"""Within which a connection ends whose other side is gone without a word.

Who follows a rendezvous goes by what it read last until then. So this is shorter than an agent that is cut off has to
end its rank (`core.fencing`: `fence_grace` and `margin`), and a rank that is lost with its rendezvous is given up later
by as much.
"""
HEARTBEATS = "/basilica/heartbeats"  # beside etcd's own paths


@dataclass(frozen=True, slots=True)
class Answer:
    """`index` is X-Etcd-Index: the state of the keyspace that the answer reflects. `status` 404: no such key."""

    status: int
    index: int
    body: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def node(self) -> Mapping[str, Any]:
        found = self.body.get("node")
        return found if isinstance(found, Mapping) else {}

    def children(self) -> list[str]:
        """The keys directly below the node."""
        return [child["key"] for child in self.node.get("nodes") or () if isinstance(child, Mapping) and "key" in child]

    def leaves(self) -> dict[str, str]:
        """All values at and below the node, by key."""
        found: dict[str, str] = {}
        todo = [self.node]
        while todo:
            node = todo.pop()
            todo += [child for child in node.get("nodes") or () if isinstance(child, Mapping)]
            if isinstance(node.get("value"), str) and isinstance(node.get("key"), str):
                found[node["key"]] = node["value"]
        return found


class KeysClient:
    """Calls raise `NoAnswer`; what etcd itself refuses is an `Answer`. After either the client can go on."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is host:port."""
        host, _, port = endpoint.rpartition(":")

        async def connect() -> Streams:
            streams = await asyncio.open_connection(host.strip("[]"), int(port), limit=MAX_HEAD)
            _notice_silence(streams[1].get_extra_info("socket"))
            return streams

        self._exchange = Exchange(connect, endpoint)

    async def close(self) -> None:
        await self._exchange.close()

    async def get(self, key: str, *, recursive: bool = False) -> Answer:
        return await self._ask("GET", key, {"recursive": "true"} if recursive else {})

    async def put(
        self,
        key: str,
        value: str,
        *,
        ttl: int | None = None,
        prev_exist: bool | None = None,
        prev_value: str | None = None,
        prev_index: int | None = None,
    ) -> Answer:
        form: dict[str, str] = {"value": value}
        if ttl is not None:
            form["ttl"] = str(ttl)
        if prev_exist is not None:
            form["prevExist"] = "true" if prev_exist else "false"
        if prev_value is not None:
            form["prevValue"] = prev_value
        if prev_index is not None:
            form["prevIndex"] = str(prev_index)
        conditional = any(condition is not None for condition in (prev_exist, prev_value, prev_index))
        # Repeated, a conditional write would fail on its own success.
        return await self._ask("PUT", key, {}, form, repeatable=not conditional)

    async def delete(self, key: str, *, recursive: bool = False) -> Answer:
        return await self._ask("DELETE", key, {"recursive": "true"} if recursive else {})

    async def wait(self, key: str, since: int, *, recursive: bool = False) -> Answer:
        """The first change of the key at or after the index `since`, however long it takes.

        Not asked again on another connection: behind it may be a keyspace that was begun anew, which would count for
        long until it came to that index.
        """
        query = {"wait": "true", "waitIndex": str(since)} | ({"recursive": "true"} if recursive else {})
        return await self._ask("GET", key, query, within=None, repeatable=False)

    async def heartbeat(self, agent: str, every: float, gap: float | None, *, within: float) -> bool:
        """Tell the rendezvous that this agent is there; False if it is one that takes no heartbeats.

        `every`: seconds until the next. `gap`: since the last one that was answered, None if there was none.
        """
        form = {"every": f"{every:.3f}"} | ({} if gap is None else {"gap": f"{gap:.3f}"})
        target = f"{HEARTBEATS}/{quote(agent)}"
        answer = await self._exchange.ask("PUT", target, urlencode(form), within=within)
        if answer.status >= 500:
            raise NoAnswer(f"PUT {target}: {answer.status}")
        return answer.status < 300

    async def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        form: Mapping[str, str] | None = None,
        *,
        within: float | None = ANSWER_WITHIN_S,
        repeatable: bool = True,
    ) -> Answer:
        target = f"/v2/keys/{quote(key.strip('/'))}" + (f"?{urlencode(query)}" if query else "")
        encoded = None if form is None else urlencode(form)
        message = await self._exchange.ask(method, target, encoded, within=within, repeatable=repeatable)
        try:
            body = json.loads(message.body) if message.body.strip() else {}
            index = int(message.headers.get("x-etcd-index", "0"))
        except ValueError as error:
            raise NoAnswer(f"{method} {key}: {error}") from error
        if not isinstance(body, dict):
            raise NoAnswer(f"{method} {key}: the answer is no JSON object")
        return Answer(message.status, index, body)


def _notice_silence(connection: socket.socket) -> None:
    """Have the kernel end a connection to a machine that is gone, within `NOTICED_AFTER_S`. It wakes nobody before.

    A wait may last for days, and a machine that is cut off ends no connection. While a request has yet to be
    acknowledged there are no keepalives: without a time for those too, the kernel would send it again for 15 minutes.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_AFTER_S),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", NOTICED_AFTER_S * 1000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
