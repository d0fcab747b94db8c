"""A mirror of our events as Kubernetes' own, so that `kubectl describe` and `kubectl get events` show them.

They are a copy: Kubernetes drops its Events after an hour, the run keeps its own. So they are written in the
background, in order, and one that cannot be written is given up after a while.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from basilica.core.events import Event
from basilica.kube.client.api import ApiError, KubeApi, delay
from basilica.kube.manifests.userdeployment import API_VERSION, KIND, Json, timestamp
from basilica.stores.kubernetes.calls import core_path

log = logging.getLogger("basilica.store")

QUEUE_MAX = 500
TRIES = 6
MESSAGE_MAX = 1024
FLUSH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Queued:
    metadata: Json
    event: Event
    at: float
    count: int


class EventMirror:
    """Writes one event after the other."""

    def __init__(self, api: KubeApi, component: str) -> None:
        self._api, self._component = api, component
        self._queue: deque[_Queued] = deque()
        self._task: asyncio.Task[None] | None = None

    def publish(self, obj: Json, events: Iterable[Event], at: float, counts: dict[tuple[str, str], int]) -> None:
        """Enqueue events. `counts`: how often each has happened by now, by reason and message."""
        for event in events:
            if len(self._queue) >= QUEUE_MAX:
                self._queue.popleft()
            count = counts.get((event.reason, event.message), 1)
            self._queue.append(_Queued(obj["metadata"], event, at, count))
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._work(), name="event-mirror")

    async def close(self) -> None:
        """Write the rest of the queue, within a short time."""
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait({task}, timeout=FLUSH_SECONDS)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _work(self) -> None:
        while self._queue:
            queued = self._queue.popleft()
            for attempt in range(TRIES):
                try:
                    await self._write(queued)
                    break
                except ApiError as error:
                    if not error.transient:
                        log.info("event %s of %s not written: %s", queued.event.reason, queued.metadata["name"], error)
                        break
                    await asyncio.sleep(delay(attempt, error.retry_after))

    async def _write(self, queued: _Queued) -> None:
        namespace, name = queued.metadata["namespace"], event_name(queued.metadata, queued.event)
        path = core_path(namespace, "events", name)
        if queued.count == 1:
            try:
                await self._api.create(core_path(namespace, "events"), self._body(name, queued))
                return
            except ApiError as error:
                if error.status != 409:
                    raise
        change = {"count": queued.count, "lastTimestamp": timestamp(queued.at)}
        try:
            await self._api.merge_patch(path, change)
        except ApiError as error:
            if error.status != 404:
                raise
            await self._api.create(core_path(namespace, "events"), self._body(name, queued))  # it was dropped

    def _body(self, name: str, queued: _Queued) -> Json:
        about = {key: queued.metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        at = timestamp(queued.at)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": queued.metadata["namespace"]},
            "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **about},
            "type": queued.event.kind,
            "reason": queued.event.reason,
            "message": queued.event.message[:MESSAGE_MAX],
            "count": queued.count,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": "",
        }


def event_name(metadata: Json, event: Event) -> str:
    """Return a name that is the same for equal events of one object: they are counted, not written again."""
    what = f"{metadata['uid']}/{event.reason}/{event.message}"
    return f"{metadata['name']}.{hashlib.sha256(what.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
