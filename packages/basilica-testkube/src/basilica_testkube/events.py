"""Events about objects, as `kubectl describe` shows them."""

import uuid

from basilica_testkube.errors import ApiError
from basilica_testkube.kinds import EVENTS
from basilica_testkube.options import DECODED
from basilica_testkube.registry import Registry
from basilica_testkube.timing import Timing
from basilica_testkube.values import Json, key_of, meta


class Events:
    """Writes events; the same one again is counted, not written anew. They go after a while."""

    def __init__(self, registry: Registry, timing: Timing, component: str = "basilica-testkube") -> None:
        self._registry, self._timing, self._component = registry, timing, component
        self._known: dict[tuple[str, str, str], Json] = {}

    def tell(self, obj: Json, level: str, reason: str, message: str) -> None:
        key = (meta(obj)["uid"], reason, message)
        now = self._registry.clock.stamp()
        if key in self._known:

            def again(event: Json) -> None:
                event |= {"count": event["count"] + 1, "lastTimestamp": now}

            if self._registry.change(EVENTS, self._known[key], again) is not None:
                return
        try:
            self._known[key] = self._registry.create(
                EVENTS, meta(obj).get("namespace") or "default", self._new(obj, level, reason, message), DECODED
            )
        except ApiError as error:
            if error.code not in (403, 404):  # the namespace is going or gone
                raise
            return
        self._registry.clock.call_later(self._timing.event_ttl, lambda: self._forget(key))

    def _new(self, obj: Json, level: str, reason: str, message: str) -> Json:
        now = self._registry.clock.stamp()
        about = {
            "kind": obj["kind"],
            "apiVersion": obj["apiVersion"],
            "name": meta(obj)["name"],
            "uid": meta(obj)["uid"],
        }
        about |= {"namespace": meta(obj)["namespace"]} if "namespace" in meta(obj) else {}
        return {
            "metadata": {"name": f"{meta(obj)['name'][:200]}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": about,
            "type": level,
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": "",
        }

    def _forget(self, key: tuple[str, str, str]) -> None:
        event = self._known.pop(key, None)
        if event is not None and self._registry.store.get(EVENTS, *key_of(event)) is not None:
            self._registry.delete(EVENTS, *key_of(event))
