"""A store against the plain one: whatever is done in whatever order, both say the same."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from basilica.core.errors import BasilicaError
from basilica.core.events import Event
from basilica.core.phase import Phase
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import Usage
from basilica.ports import Deployment, Limits, Store
from basilica.stores.memory import MemoryStore
from basilica.testing.store_contract import a_run

USERS = ("ann", "bob")

instances = st.sampled_from([f"run-{number}" for number in range(8)])
names = st.sampled_from(["train", "eval"])
times = st.sampled_from([0.0, 1.0, 2.0, 86400.0, 100_000.0])
events = st.lists(st.builds(Event, st.sampled_from(["Created", "RankLost"]), st.sampled_from(["a", "b"])), max_size=3)
limits = st.builds(Limits, deployments=st.none() | st.integers(0, 3), ranks=st.none() | st.integers(0, 6))
phases = st.sampled_from([Phase.PENDING, Phase.READY, Phase.FAILED])

Act = Callable[[Store], Awaitable[object]]


def _new_run(number: int, name: str, target: int) -> Deployment:
    """Instance names are random letters: no two users ever get the same, and no store promises to notice it."""
    return a_run(f"run-{number}", name=name, user=USERS[number % len(USERS)], target=target)


new_runs = st.builds(_new_run, st.integers(0, 7), names, st.integers(1, 2))


class StoreMachine(RuleBasedStateMachine):
    """Each rule does the same to both stores and compares what they return or refuse with."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.time = 0.0
        self.plain = MemoryStore(now=lambda: self.time)
        self.returned: list[tuple[Deployment, Deployment]] = []

    async def open(self) -> None:
        """Open the store that is tried as `store`, on what is there of it."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def comparable(self, result: Any) -> Any:
        """What of a result, or of a refusal, is the same for both stores."""
        return (type(result), str(result)) if isinstance(result, BasilicaError) else result

    def same(self, act: Act) -> None:
        expected, got = (self.loop.run(_outcome(act, store)) for store in (self.plain, self.store))
        assert self.comparable(got) == self.comparable(expected)
        if isinstance(got, Deployment) and isinstance(expected, Deployment):
            self.returned.append((expected, got))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.loop.run(self.close())
        self.loop.close()

    @rule(new=new_runs, events=events, limits=limits)
    def create(self, new: Deployment, events: list[Event], limits: Limits) -> None:
        new = self._dated(new)
        self.same(lambda store: store.create(new, events, limits=limits))

    @rule(new=new_runs, key=st.sampled_from("kl"))
    def create_with_key(self, new: Deployment, key: str) -> None:
        new = self._dated(new)
        self.same(lambda store: store.create(new, idempotency_key=key))

    @rule(seconds=st.sampled_from([1.0, 86399.0, 86400.0]))
    def time_passes(self, seconds: float) -> None:
        self.time += seconds

    @rule(instance=instances)
    def get(self, instance: str) -> None:
        self.same(lambda store: store.get(instance))

    @rule(age=st.integers(0, 5), phase=phases, settled=st.booleans(), events=events, now=times)
    def save_status(self, age: int, phase: Phase, settled: bool, events: list[Event], now: float) -> None:
        """On a state that was returned a while ago, so that it may or may not be the newest of its run."""
        if age >= len(self.returned):
            return
        plain, ours = self.returned[-1 - age]
        if plain.status.phase.terminal and not phase.terminal:
            return
        status = replace(
            plain.status,
            phase=phase,
            settled=settled and phase.terminal,
            terminal_at=now if phase.terminal else None,
            usage=Usage(now, now / 2),
        )
        self.same(lambda store: store.save_status(plain if store is self.plain else ours, status, events, now=now))

    @rule(instance=instances, ranks=st.integers(0, 9), events=events, limits=limits)
    def scale(self, instance: str, ranks: int, events: list[Event], limits: Limits) -> None:
        def scaled(d: Deployment) -> DeploymentSpec:
            return d.spec if d.spec.world.target == ranks else d.spec.scaled(ranks)

        self.same(lambda store: store.change_spec(instance, scaled, events, limits=limits))

    @rule(instance=instances, wanted=st.sampled_from(Wanted))
    def end(self, instance: str, wanted: Wanted) -> None:
        self.same(lambda store: store.change_spec(instance, lambda d: d.spec.ended_by(wanted)))

    @rule(instance=instances)
    def delete(self, instance: str) -> None:
        self.same(lambda store: store.delete(instance))

    @rule(user=st.sampled_from(USERS), name=names | instances)
    def find(self, user: str, name: str) -> None:
        self.same(lambda store: store.find(f"u-{user}", name))

    @rule(before=times)
    def prune(self, before: float) -> None:
        self.same(lambda store: store.prune(before))

    @rule()
    def reopen(self) -> None:
        self.loop.run(self.close())
        self.loop.run(self.open())

    @invariant()
    def the_same_is_there(self) -> None:
        self.same(lambda store: store.deployments())
        self.same(lambda store: store.deployments("u-ann"))
        self.same(lambda store: store.live())
        self.same(lambda store: store.usage("ann"))
        self.same(lambda store: store.events("run-1"))

    def _dated(self, new: Deployment) -> Deployment:
        return replace(new, status=replace(new.status, created_at=self.time))


async def _outcome(act: Act, store: Store) -> Any:
    try:
        return await act(store)
    except BasilicaError as error:
        return error
