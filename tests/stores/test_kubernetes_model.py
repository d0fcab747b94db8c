"""The store on custom resources against the plain one: whatever is done, and whatever the API server does meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.exploring import examples

from basilica.core.errors import BasilicaError
from basilica.core.events import Event, RecordedEvent
from basilica.core.phase import Phase
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import Usage
from basilica.kube.api import KubeApi
from basilica.kube.crd import definition
from basilica.ports import Deployment, Limits, Store, UsageRow
from basilica.stores.kubernetes import KubernetesStore
from basilica.stores.memory import MemoryStore
from basilica.testing.kube import KubeServer
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


class KubernetesMachine(RuleBasedStateMachine):
    """Each rule does the same to both stores; apart from versions, both return or refuse the same."""

    @initialize()
    def begin(self) -> None:
        self.kube = KubeServer(processes=False).start()
        self.kube.create(definition())
        self.loop = asyncio.Runner()
        self.time = 0.0
        self.plain = MemoryStore(now=lambda: self.time)
        self.returned: list[tuple[Deployment, Deployment]] = []
        self.api, self.store = self.loop.run(self._open())

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
        self._same(
            lambda store: store.save_status(plain if store is self.plain else ours, status, events, now=now),
        )

    @rule(instance=instances, ranks=st.integers(0, 9), events=events, limits=limits)
    def scale(self, instance: str, ranks: int, events: list[Event], limits: Limits) -> None:
        def scaled(d: Deployment) -> DeploymentSpec:
            return d.spec if d.spec.world.target == ranks else d.spec.scaled(ranks)

        self._same(lambda store: store.change_spec(instance, scaled, events, limits=limits))

    @rule(instance=instances, wanted=st.sampled_from(Wanted))
    def end(self, instance: str, wanted: Wanted) -> None:
        self._same(lambda store: store.change_spec(instance, lambda d: d.spec.ended_by(wanted)))

    @rule(instance=instances)
    def delete(self, instance: str) -> None:
        self._same(lambda store: store.delete(instance))

    @rule(user=users, name=names | instances)
    def find(self, user: str, name: str) -> None:
        self._same(lambda store: store.find(f"u-{user}", name))

    @rule(before=times)
    def prune(self, before: float) -> None:
        self._same(lambda store: store.prune(before))

    @rule(how=st.sampled_from(["cut", "gone", "forgotten", "reopened"]))
    def something_breaks(self, how: str) -> None:
        if how == "cut":
            self.kube.cut_watches()
        elif how == "gone":
            self.kube.expire_watches()
        elif how == "forgotten":
            self.kube.compact()
            self.kube.cut_watches()
        else:
            self.loop.run(self._close())
            before = self.store
            self.api, self.store = self.loop.run(self._open())
            assert before is not self.store

    @invariant()
    def the_same_is_there(self) -> None:
        self._same(lambda store: store.deployments())
        self._same(lambda store: store.deployments("u-ann"))
        self._same(lambda store: store.live())
        self._same(lambda store: store.usage("ann"))
        self._same(lambda store: store.events("run-1"))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run(self._close())
            self.loop.close()
            self.kube.close()

    async def _open(self) -> tuple[KubeApi, KubernetesStore]:
        api = KubeApi(self.kube.url)
        store = KubernetesStore(api, now=lambda: self.time)
        await store.open()
        return api, store

    async def _close(self) -> None:
        await self.store.close()
        await self.api.close()

    def _same(self, act: Act) -> None:
        expected, got = (self.loop.run(_outcome(act, store)) for store in (self.plain, self.store))
        assert _apart_from_versions(got) == _apart_from_versions(expected)
        if isinstance(got, Deployment) and isinstance(expected, Deployment):
            self.returned.append((expected, got))

    def _dated(self, new: Deployment) -> Deployment:
        return replace(new, status=replace(new.status, created_at=self.time))


async def _outcome(act: Act, store: Store) -> Any:
    try:
        return await act(store)
    except BasilicaError as error:
        return type(error)


def _apart_from_versions(result: Any) -> Any:
    if isinstance(result, Deployment):
        return replace(result, version=0, owner=None)
    if isinstance(result, RecordedEvent):
        return replace(result, version=0)
    if isinstance(result, list) and result and isinstance(result[0], UsageRow):
        return sorted(result, key=lambda row: row.instance)  # of one moment, the deleted ones are in no order
    return [_apart_from_versions(item) for item in result] if isinstance(result, list) else result


TestKubernetesMachine = KubernetesMachine.TestCase
TestKubernetesMachine.settings = settings(max_examples=examples(12), stateful_step_count=30)
TestKubernetesMachine.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]
