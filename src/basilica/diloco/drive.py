"""Runs the protocol against a real store: the only code of a round that does anything. It counts what it does."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from basilica.diloco.background import Background, check
from basilica.diloco.effects import Begin, Create, Delete, Effect, Finish, Flow, List, Now, Pause, Put, Range
from basilica.diloco.stores.port import ObjectStore

T = TypeVar("T")
Answers = list["memoryview | None"]


@dataclass(slots=True)
class Traffic:
    """What went over the wire."""

    up: int = 0
    down: int = 0
    requests: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.requests[what] = self.requests.get(what, 0) + 1


class Driver:
    """Answers a flow's effects from a store; reads run in threads where the store gains by that.

    Once `stopped` is set, a flow gets no further answer: it ends with `CancelledError`.
    """

    def __init__(self, store: ObjectStore, stopped: threading.Event | None = None) -> None:
        self._store = store
        self._readers = Background("basilica-diloco", store.parallel)
        self._stopped = stopped or threading.Event()

    def run(self, flow: Flow[T], traffic: Traffic) -> T:
        """To the end; the calling thread waits."""
        answer: object = None
        try:
            while True:
                check(self._stopped)
                answer = self._do(flow.send(answer), traffic)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            flow.close()

    def close(self, *, wait: bool = True) -> None:
        self._readers.close(wait=wait)

    def _do(self, effect: Effect, traffic: Traffic) -> object:
        store = self._store
        match effect:
            case Now():
                return time.monotonic()
            case Pause(prefix, seconds):
                store.wait_for_change(prefix, seconds)
                return None
            case List(prefix, after):
                traffic.count("list")
                return store.list(prefix, after)
            case Begin(ranges):
                return self._begin(ranges)
            case Finish(ticket):
                return self._finish(ticket, traffic)
            case Create(key, size, buffers):
                traffic.count("put")
                traffic.up += size
                return store.put_if_absent(key, size, buffers)
            case Put(key, size, buffers):
                traffic.count("put")
                traffic.up += size
                store.put(key, size, buffers)
                return None
            case Delete(keys):
                traffic.count("delete")
                store.delete(keys)
                return None
            case _:
                assert_never(effect)

    def _begin(self, ranges: tuple[Range, ...]) -> "list[Range] | list[Future[memoryview | None]]":
        if self._store.parallel == 1:
            return list(ranges)
        return [self._readers.submit(self._store.read, range) for range in ranges]

    def _finish(self, ticket: "list[Range] | list[Future[memoryview | None]]", traffic: Traffic) -> Answers:
        answers: Answers = []
        for entry in ticket:
            answer = entry.result() if isinstance(entry, Future) else self._store.read(entry)
            traffic.count("get")
            traffic.down += len(answer) if answer is not None else 0
            answers.append(answer)
        return answers
