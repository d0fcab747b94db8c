"""Objects in the memory of this process, for replicas that are threads."""

import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar

from basilica.diloco.effects import Found, Range


class MemoryStore:
    first_pause = 0.05
    longest_pause = 1.0
    piece_bytes = 8 << 20
    parallel = 1

    _named: ClassVar[dict[str, "MemoryStore"]] = {}
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._version = 0
        self._seen = threading.local()

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """The store of that name: the same for the whole process."""
        with cls._naming:
            return cls._named.setdefault(name, cls())

    def put(self, key: str, size: int, buffers: Iterable[memoryview]) -> None:
        self._store(key, b"".join(buffers))

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        data = b"".join(buffers)
        with self._changed:
            if key in self._objects:
                return False
            self._store(key, data)
            return True

    def _store(self, key: str, data: bytes) -> None:
        with self._changed:
            self._objects[key] = data
            self._version += 1
            self._changed.notify_all()

    def read(self, range: Range) -> memoryview | None:
        data = self._objects.get(range.key)
        if data is None:
            return None
        wanted = memoryview(data)[range.start : range.start + range.length]
        if range.into is None:
            return wanted
        range.into[: len(wanted)] = wanted
        return range.into[: len(wanted)]

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        with self._changed:
            self._seen.version = self._version
            keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
            return tuple(Found(key, len(self._objects[key])) for key in keys)

    def delete(self, keys: Sequence[str]) -> None:
        with self._changed:
            for key in keys:
                self._objects.pop(key, None)

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        """Woken by any write since this thread last listed."""
        seen = getattr(self._seen, "version", -1)
        with self._changed:
            self._changed.wait_for(lambda: self._version != seen, seconds)
