"""A copy of what a cluster has of one kind, kept up to date by a watch: a look costs no request.

The copy is listed once and then follows the watch through disconnects. Only a version that the server has forgotten
makes it list again. While nothing changes, nothing is asked.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from basilica.kube.client.api import PAGE, ApiError, KubeApi, delay

Json = dict[str, Any]
Key = tuple[str, str]  # namespace, name

log = logging.getLogger(__name__)
_SLOWEST = 10  # failures in a row after which the pause grows no more


class Informer:
    """All objects under a path. `on_change` gets each object that changed, for a deleted one its last state.

    What is gone is no longer found by `get`. `on_back` is called when the server answers again, with how many seconds
    it did not, before what changed meanwhile.
    """

    def __init__(
        self,
        api: KubeApi,
        path: str,
        *,
        label_selector: str = "",
        field_selector: str = "",
        on_change: Callable[[Json], None] | None = None,
        on_back: Callable[[float], None] = lambda away_for: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_back, self._monotonic = on_back, monotonic
        self._api, self._path = api, path
        self._labels, self._fields = label_selector, field_selector
        self._on_change = on_change
        self._objects: dict[Key, Json] = {}
        self._synced = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._told = 0  # the version up to which the watch has told
        self.problem: ApiError | None = None  # why the copy may be behind; None while it follows the cluster
        self._problem_since: float | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=f"informer {self._path}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def synced(self) -> None:
        """Return when everything has been listed once."""
        self.start()
        await self._synced.wait()

    @property
    def is_synced(self) -> bool:
        return self._synced.is_set()

    @property
    def behind_for(self) -> float | None:
        """For how many seconds the cluster could not be asked; None while the copy follows it."""
        return None if self._problem_since is None else self._monotonic() - self._problem_since

    @property
    def version(self) -> int:
        """Up to where the cluster has told us."""
        return self._told

    def get(self, namespace: str, name: str) -> Json | None:
        """The object as last seen; it must not be changed."""
        return self._objects.get((namespace, name))

    def all(self) -> list[Json]:
        return list(self._objects.values())

    def learn(self, obj: Json) -> None:
        """Take in what a write of our own answered, before the watch tells of it. What it has told already stays."""
        key = key_of(obj)
        known = self._objects.get(key)
        if version_of(obj) > self._told and (known is None or version_of(known) < version_of(obj)):
            self._objects[key] = obj

    # -- following

    async def _follow(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                async for told in self._watch(version):
                    version, self._told = told, max(self._told, int(told))
                pause = delay(0)  # the server ends each watch after a while; that is no trouble
            except ApiError as error:
                if error.status == 410:
                    version = ""
                self.problem = error
                if error.status != 410:  # then the server answers
                    self._problem_since = self._monotonic() if self._problem_since is None else self._problem_since
                pause = delay(self._failures, error.retry_after)
                self._failures = min(self._failures + 1, _SLOWEST)
                log.info("the watch of %s broke: %s", self._path, error)
            await asyncio.sleep(pause)

    async def _list(self) -> str:
        found, version = await self._api.list(
            self._path, label_selector=self._labels, field_selector=self._fields, limit=PAGE
        )
        before, self._objects = self._objects, {key_of(obj): obj for obj in found}
        self._told = int(version)
        self._is_well()
        self._synced.set()
        for key, obj in self._objects.items():
            if before.get(key) != obj:
                self._tell(obj)
        for key in before.keys() - self._objects.keys():
            self._tell(before[key])
        return version

    def _is_well(self) -> None:
        away_for, self._problem_since = self.behind_for, None
        self.problem, self._failures = None, 0
        if away_for is not None:
            self._on_back(away_for)

    async def _watch(self, version: str) -> AsyncGenerator[str, None]:
        """Follow until the server ends it; yields each version that was told of."""
        changes = self._api.watch(
            self._path,
            resource_version=version,
            label_selector=self._labels,
            field_selector=self._fields,
            on_open=self._is_well,
        )
        async with aclosing(changes):
            async for kind, obj in changes:
                if kind != "BOOKMARK":
                    self._take(kind, obj)
                yield str(obj["metadata"]["resourceVersion"])

    def _take(self, kind: str, obj: Json) -> None:
        key = key_of(obj)
        known = self._objects.get(key)
        if known is not None and version_of(known) > version_of(obj):
            return  # something newer was learnt before the watch told of this
        if kind == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = obj
        self._tell(obj)

    def _tell(self, obj: Json) -> None:
        if self._on_change is not None:
            self._on_change(obj)


def key_of(obj: Json) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(obj: Json) -> int:
    """Versions of one kind are numbers that grow; the API has always kept to it, and now promises it."""
    return int(obj["metadata"]["resourceVersion"])
