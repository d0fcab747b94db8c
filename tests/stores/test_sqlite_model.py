"""The SQLite store against the plain one: whatever is done in whatever order, both say the same."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.exploring import examples

from basilica.core.errors import BasilicaError
from basilica.core.events import Event
from basilica.core.phase import Phase
from basilica.core.spec import Wanted
from basilica.core.status import Usage
from basilica.ports import Deployment, Limits, Store
from basilica.stores.memory import MemoryStore
from basilica.stores.sqlite import SqliteStore
from basilica.testing.store_contract import a_run

instances = st.sampled_from([f"run-{number}" for number in range(8)])
names = st.sampled_from(["train", "eval"])
users = st.sampled_from(["ann", "bob"])
times = st.sampled_from([0.0, 1.0, 2.0, 86400.0, 100_000.0])
events = st.lists(st.builds(Event, st.sampled_from(["Created", "RankLost"]), st.sampled_from(["a", "b"])), max_size=3)
limits = st.builds(Limits, deployments=st.none() | st.integers(0, 3), ranks=st.none() | st.integers(0, 6))
new_runs = st.builds(a_run, instances, name=names, user=users, target=st.integers(1, 2))
phases = st.sampled_from([Phase.PENDING, Phase.READY, Phase.FAILED])

Act = Callable[[Store], Awaitable[object]]


class StoreMachine(RuleBasedStateMachine):
    """Each rule does the same to both stores and compares what they return or refuse with."""

    @initialize(cache=st.sampled_from([0, 10_000, 1 << 20]))
    def begin(self, cache: int) -> None:
        self.cache = cache
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.Runner()
        self.time = 0.0
        self.markers = 0
        self.plain = MemoryStore(now=lambda: self.time)
        self.returned: list[Deployment] = []
        self.sqlite = self._open()

    @rule(new=new_runs, events=events, limits=limits)
    def create(self, new: Deployment, events: list[Event], limits: Limits) -> None:
        new = self._dated(new)
        self._same(lambda store: store.create(new, events, limits=limits))

    @rule(new=new_runs, key=st.sampled_from("kl"))
    def create_with_key(self, new: Deployment, key: str) -> None:
        new = self._dated(new)
        self._same(lambda store: store.create(new, idempotency_key=key))

    @rule(seconds=st.sampled_from([1.0, 86399.0, 86400.0]))
    def time_passes(self, seconds: float) -> None:
        self.time += seconds

    @rule(instance=instances)
    def get(self, instance: str) -> None:
        self._same(lambda store: store.get(instance))

    @rule(age=st.integers(0, 5), phase=phases, settled=st.booleans(), events=events, now=times)
    def save_status(self, age: int, phase: Phase, settled: bool, events: list[Event], now: float) -> None:
        """On a state that was returned a while ago, so that it may or may not be the newest of its run."""
        if age >= len(self.returned):
            return
        before = self.returned[-1 - age]
        if before.status.phase.terminal and not phase.terminal:
            return
        status = replace(
            before.status,
            phase=phase,
            settled=settled and phase.terminal,
            terminal_at=now if phase.terminal else None,
            usage=Usage(now, now / 2),
        )
        self._same(lambda store: store.save_status(before, status, events, now=now))

    @rule(instance=instances, ranks=st.integers(0, 9), events=events, limits=limits)
    def scale(self, instance: str, ranks: int, events: list[Event], limits: Limits) -> None:
        self._same(lambda store: store.change_spec(instance, lambda d: d.spec.scaled(ranks), events, limits=limits))

    @rule(instance=instances, wanted=st.sampled_from(Wanted))
    def end(self, instance: str, wanted: Wanted) -> None:
        self._same(lambda store: store.change_spec(instance, lambda d: d.spec.ended_by(wanted)))

    @rule(instance=instances)
    def delete(self, instance: str) -> None:
        self._same(lambda store: store.delete(instance))

    @rule()
    def reopen(self) -> None:
        self.loop.run(self.sqlite.close())
        self.sqlite = self._open()

    @rule(since=st.integers(0, 20))
    def come_back(self, since: int) -> None:
        self.markers += 1
        marker = f"marker-{self.markers}"
        self._same(lambda store: _pending(store, since, marker))

    @rule(user=users, name=names | instances)
    def find(self, user: str, name: str) -> None:
        self._same(lambda store: store.find(f"u-{user}", name))

    @rule(before=times)
    def prune(self, before: float) -> None:
        self._same(lambda store: store.prune(before))

    @invariant()
    def the_same_is_there(self) -> None:
        self._same(lambda store: store.deployments())
        self._same(lambda store: store.deployments("u-ann"))
        self._same(lambda store: store.live())
        self._same(lambda store: store.usage("ann"))
        self._same(lambda store: store.events("run-1"))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run(self.sqlite.close())
            self.loop.close()
            self.directory.cleanup()

    def _open(self) -> SqliteStore:
        path = Path(self.directory.name) / "state.db"
        store = SqliteStore(path, cache_characters=self.cache, now=lambda: self.time)
        self.loop.run(store.open())
        return store

    def _same(self, act: Act) -> None:
        expected, got = (self.loop.run(_outcome(act, store)) for store in (self.plain, self.sqlite))
        assert got == expected
        if isinstance(got, Deployment):
            self.returned.append(got)

    def _dated(self, new: Deployment) -> Deployment:
        return replace(new, status=replace(new.status, created_at=self.time))


async def _outcome(act: Act, store: Store) -> Any:
    try:
        return await act(store)
    except BasilicaError as error:
        return type(error), str(error)


async def _pending(store: Store, since: int, marker: str) -> list[str]:
    """What a reader that comes back finds waiting, until it meets the marker."""
    changes = store.changes(since)
    found = []
    await store.create(a_run(marker, name=marker, user="eve"))
    await store.delete(marker)
    while (instance := await anext(changes)) != marker:
        found.append(instance)
    await changes.aclose()
    return found


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(30), stateful_step_count=40)
