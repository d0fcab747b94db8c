"""Tickets serialize the decisions of several servers on a user's names, limits and repeated requests.

Kubernetes has no transactions over several objects. So a server that is about to make or enlarge a run first takes
the ticket of the namespace, a ConfigMap, by compare-and-swap, and writes its intended work into it. The server that
comes next waits until its own watch has shown that work: then it knows of every earlier decision.

A ticket whose work never shows up belongs to a server that died in between. It is taken over after a while that is
longer than any request lives, measured by the waiting server.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from basilica.core.errors import StoreUnavailable
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.namespaces import in_namespace
from basilica.kube.manifests.userdeployment import Json
from basilica.stores.kubernetes.calls import MANAGED_BY, core_path, unavailable

NAME = "basilica-ticket"
TRIES = 20
ABANDONED_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a ticket: this run will have at least this generation."""

    instance: str
    generation: int


@dataclass(frozen=True, slots=True)
class _Book:
    version: str
    work: Work | None


class Tickets:
    """`shown` waits a little for the watch to show that work, or its end; False if it has not."""

    def __init__(self, api: KubeApi, shown: Callable[[str, Work], Awaitable[bool]]) -> None:
        self._api, self._shown = api, shown
        self._locks: dict[str, asyncio.Lock] = {}
        self._books: dict[str, _Book] = {}
        self._awaited: dict[tuple[str, Work], float] = {}  # since when, by our own clock

    def lock(self, namespace: str) -> asyncio.Lock:
        """Return the lock by which the tasks of one server take turns; servers take turns by the ticket."""
        return self._locks.setdefault(namespace, asyncio.Lock())

    async def take(self, namespace: str, decide: Callable[[], Awaitable[Work | None]]) -> int | None:
        """Call `decide` when every earlier decision is known, and write its work into the ticket.

        It may raise to refuse. Return a number that grows with every ticket of the cluster, or None where `decide`
        found that there is nothing to do.
        """
        try:
            for _ in range(TRIES):
                book = self._books.get(namespace) or await self._open(namespace)
                await self._catch_up(namespace, book)
                work = await decide()
                if work is None:
                    return None
                if await self._write(namespace, book, work):
                    return int(self._books[namespace].version)
                self._books[namespace] = await self._open(namespace)
        except ApiError as error:
            raise unavailable(error) from error
        raise StoreUnavailable(f"too many servers make runs in {namespace} at once; try again")

    async def give_back(self, namespace: str) -> None:
        """Clear the ticket of failed work. If this does not arrive, the others wait for a while and go on."""
        book = self._books.get(namespace)
        if book is not None:
            try:
                await self._write(namespace, book, None)
            except ApiError:
                self._books.pop(namespace, None)

    async def _open(self, namespace: str) -> _Book:
        """Read the ticket; it is created, with its namespace, if there is none."""
        objects = core_path(namespace, "configmaps")
        metadata = {"name": NAME, "namespace": namespace, "labels": dict(MANAGED_BY)}
        for _ in range(TRIES):
            try:
                return _read(await self._api.get(f"{objects}/{NAME}"))
            except ApiError as error:
                if error.status != 404:
                    raise
            try:
                body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
                return _read(await in_namespace(self._api, namespace, partial(self._api.create, objects, body)))
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        raise StoreUnavailable(f"the namespace {namespace} comes and goes; try again")

    async def _catch_up(self, namespace: str, book: _Book) -> None:
        if book.work is None or await self._shown(namespace, book.work):
            return
        began = self._awaited.setdefault((namespace, book.work), time.monotonic())
        if time.monotonic() - began < ABANDONED_SECONDS:
            self._books.pop(namespace, None)
            raise StoreUnavailable(f"another server is making {book.work.instance} at this moment; try again")
        self._awaited.pop((namespace, book.work), None)

    async def _write(self, namespace: str, book: _Book, work: Work | None) -> bool:
        """Write the ticket; False if another server has written in between."""
        text = None if work is None else json.dumps([work.instance, work.generation])
        body: Json = {"metadata": {"resourceVersion": book.version}, "data": {"work": text}}
        path = core_path(namespace, "configmaps", NAME)
        try:
            self._books[namespace] = _read(await self._api.merge_patch(path, body))
        except ApiError as error:
            self._books.pop(namespace, None)
            if error.status == 409:
                return False
            if not error.transient:
                raise
            found = await self._open(namespace)  # the answer was lost: was it written?
            if found.work != work or work is None:
                return False
            self._books[namespace] = found
        return True


def _read(obj: Json) -> _Book:
    text = (obj.get("data") or {}).get("work")
    version = str(obj["metadata"]["resourceVersion"])
    try:
        instance, generation = json.loads(text) if text else ("", 0)
        return _Book(version, Work(str(instance), int(generation)) if instance else None)
    except (TypeError, ValueError):
        return _Book(version, None)  # edited by hand
