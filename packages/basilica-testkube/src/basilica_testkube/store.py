"""Objects and their history. Nothing here knows what an object means.

A stored object is never changed: a write stores another one. So a list, a watch and a controller may keep what they
were given, and nobody copies to read.
"""

import asyncio
import bisect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from basilica_testkube.errors import too_large, too_old
from basilica_testkube.kinds import Kind
from basilica_testkube.values import Json, key_of, meta

Key = tuple[str, str]
FIRST_REVISION = 1000  # as on a cluster that has lived: no client may expect to begin at 1


@dataclass(slots=True)
class Change:
    """One write of one object, for watches and controllers."""

    type: str  # ADDED, MODIFIED or DELETED
    kind: Kind
    obj: Json
    old: Json | None
    revision: int
    _encoded: bytes = field(default=b"", repr=False)

    @property
    def encoded(self) -> bytes:
        """The object as JSON, made once for all watches."""
        if not self._encoded:
            self._encoded = encode(self.obj)
        return self._encoded


def encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Cursor:
    """Where one watch stands: what it has still to be told."""

    __slots__ = ("pending", "ready")

    def __init__(self, pending: list[Change]) -> None:
        self.pending, self.ready = pending, asyncio.Event()

    def take(self) -> list[Change]:
        taken, self.pending = self.pending, []
        self.ready.clear()
        return taken


class Log:
    """The changes of one resource, oldest first, as far back as the window reaches."""

    __slots__ = ("changes", "cursors", "forgotten")

    def __init__(self, forgotten: int) -> None:
        self.changes: list[Change] = []
        self.forgotten = forgotten  # changes up to this revision cannot be told any more
        self.cursors: set[Cursor] = set()

    def since(self, revision: int) -> list[Change]:
        if revision < self.forgotten:
            raise too_old(revision, self.forgotten)
        return self.changes[bisect.bisect_right(self.changes, revision, key=lambda c: c.revision) :]

    def open(self, revision: int) -> Cursor:
        """Follow the changes after `revision`; the cursor lives until it is discarded."""
        cursor = Cursor(self.since(revision))
        self.cursors.add(cursor)
        return cursor

    def forget(self, keep: int) -> None:
        if len(self.changes) > keep:
            self.forgotten = self.changes[len(self.changes) - keep - 1].revision
            self.changes = self.changes[len(self.changes) - keep :]


class Store:
    """All objects of the cluster."""

    def __init__(self, window: int) -> None:
        self.revision = self._forgotten = FIRST_REVISION
        self._window = window
        self._objects: dict[tuple[str, str], dict[Key, Json]] = {}
        self._logs: dict[tuple[str, str], Log] = {}
        self._listeners: list[Callable[[Change], None]] = []

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` with every change, in the middle of the write: it may only take note."""
        self._listeners.append(listener)

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        return self._objects.get(kind.key, {}).get((namespace, name))

    def items(self, kind: Kind, namespace: str = "") -> list[Json]:
        """Objects by namespace and name, as lists show them."""
        found = self._objects.get(kind.key, {})
        return [found[key] for key in sorted(found) if not namespace or key[0] == namespace]

    def values(self, kind: Kind) -> Iterable[Json]:
        return self._objects.get(kind.key, {}).values()

    def put(self, kind: Kind, obj: Json) -> Json:
        """Store a new or changed object, which is the store's from now on; returns it with its resource version."""
        objects = self._objects.setdefault(kind.key, {})
        key = key_of(obj)
        old = objects.get(key)
        self.revision += 1
        meta(obj)["resourceVersion"] = str(self.revision)
        objects[key] = obj
        self._tell(Change("ADDED" if old is None else "MODIFIED", kind, obj, old, self.revision))
        return obj

    def remove(self, kind: Kind, obj: Json) -> None:
        old = self._objects[kind.key].pop(key_of(obj))
        self.revision += 1
        last = {**old, "metadata": {**meta(old), "resourceVersion": str(self.revision)}}
        self._tell(Change("DELETED", kind, last, old, self.revision))

    def log(self, kind: Kind) -> Log:
        return self._logs.setdefault(kind.key, Log(self._forgotten))

    def check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise too_large(revision, self.revision)

    def compact(self) -> None:
        """Forget all history, as etcd does every few minutes: watches from older versions are refused with 410."""
        self.revision += 1  # so that every version that anybody has seen is an old one
        self._forgotten = self.revision
        for log in self._logs.values():
            log.changes.clear()
            log.forgotten = self.revision

    def _tell(self, change: Change) -> None:
        log = self.log(change.kind)
        log.changes.append(change)
        if len(log.changes) > 2 * self._window:
            log.forget(self._window)
        for cursor in log.cursors:
            cursor.pending.append(change)
            cursor.ready.set()
        for listener in self._listeners:
            listener(change)
