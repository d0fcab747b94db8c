"""One replica's view of a store in which one request fails: before it has its effect, or after it (a lost answer)."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from basilica.diloco.effects import Found, Range
from basilica.diloco.stores.port import ObjectStore

T = TypeVar("T")


class Request(NamedTuple):
    """The `nth` time that a replica asks the same."""

    operation: str
    key: str
    nth: int = 0


@dataclass(frozen=True)
class Fault:
    request: Request
    effect: bool
    """Whether the request is carried out all the same."""
    error: BaseException


class FaultyStore:
    def __init__(self, store: ObjectStore, fault: Fault | None = None) -> None:
        self.store, self._fault = store, fault
        self.first_pause, self.longest_pause = store.first_pause, store.longest_pause
        self.piece_bytes, self.parallel = store.piece_bytes, store.parallel
        self.struck = False
        self.requests: list[Request] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._guard = threading.Lock()

    def put(self, key: str, size: int, buffers: Iterable[memoryview]) -> None:
        self._asked("put", key, lambda: self.store.put(key, size, buffers))

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        return self._asked("create", key, lambda: self.store.put_if_absent(key, size, buffers))

    def read(self, range: Range) -> memoryview | None:
        return self._asked("read", range.key, lambda: self.store.read(range))

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        return self._asked("list", prefix, lambda: self.store.list(prefix, after))

    def delete(self, keys: Sequence[str]) -> None:
        self._asked("delete", keys[0] if keys else "", lambda: self.store.delete(keys))

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        self.store.wait_for_change(prefix, seconds)

    def _asked(self, operation: str, key: str, answer: Callable[[], T]) -> T:
        with self._guard:
            request = Request(operation, key, self._counts[operation, key])
            self._counts[operation, key] += 1
            self.requests.append(request)
        fault = self._fault
        if fault is None or request != fault.request:
            return answer()
        if fault.effect:
            answer()
        self.struck = True
        raise fault.error


def repeated(call: Callable[[], T], *errors: type[BaseException]) -> tuple[T, list[BaseException]]:
    """Call until it returns: what it returned, and what it had raised before."""
    raised: list[BaseException] = []
    while True:
        try:
            return call(), raised
        except errors as error:
            raised.append(error)
            if len(raised) > 20:
                raise
