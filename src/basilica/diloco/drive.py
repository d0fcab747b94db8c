"""Runs the protocol against a real store: the only code of a round that does anything. It counts what it does."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar, assert_never

from basilica.diloco.background import Background, check
from basilica.diloco.effects import Begin, Create, Delete, Effect, Finish, Flow, List, Now, Pause, Put, Range
from basilica.diloco.stores.port import ObjectStore

T = TypeVar("T")
Answers = list["memoryview | None"]
Ticket = list[tuple[Range, "Future[memoryview | None] | None"]]
"""The ranges that are wanted, each with the thread's answer to come where it is read in one."""


@dataclass(slots=True)
class Traffic:
    """The traffic over the wire."""

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
        """To the end; the calling thread waits. An error of the store is raised in the flow, which may go on."""
        answer: object = None
        failed: Exception | None = None
        try:
            while True:
                check(self._stopped)
                effect = flow.send(answer) if failed is None else flow.throw(failed)
                answer = failed = None
                try:
                    answer = self._do(effect, traffic)
                except Exception as error:  # noqa: BLE001  the flow knows which errors it can go on from
                    failed = error
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

    def _begin(self, ranges: tuple[Range, ...]) -> Ticket:
        if self._store.parallel == 1:
            return [(range, None) for range in ranges]
        # A read that is under way when its flow fails goes on in its thread. It must not write into memory that the
        # caller may use for something else by then: so the flow's own thread puts the bytes where they belong.
        return [(range, self._readers.submit(self._store.read, replace(range, into=None))) for range in ranges]

    def _finish(self, ticket: Ticket, traffic: Traffic) -> Answers:
        answers: Answers = []
        for range, reading in ticket:
            answer = self._store.read(range) if reading is None else _put_into(range.into, reading.result())
            traffic.count("get")
            traffic.down += len(answer) if answer is not None else 0
            answers.append(answer)
        return answers


def _put_into(into: memoryview | None, read: memoryview | None) -> memoryview | None:
    if into is None or read is None:
        return read
    into[: len(read)] = read
    return into[: len(read)]
