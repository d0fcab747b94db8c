"""Of several operators one acts, whatever their clocks say."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from basilica.core.seen import Sighting
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.userdeployment import instance_of
from basilica.operator.election import NAME, Election
from basilica.operator.operator import CannotLetGo
from basilica.ports import Run
from basilica.testing.fake_runtime import FakeRuntime
from basilica_testkube import KubeServer
from tests.operator.cluster import LEASE_SECONDS, by_hand, eventually, operating, tell


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def an_election(api: KubeApi, identity: str, clock: Clock | None = None, duration: float = 15.0) -> Election:
    return Election(api, namespace="default", identity=identity, duration=duration, monotonic=clock or Clock())


STORY_LIMIT = 20 * LEASE_SECONDS


class SlowRuntime(FakeRuntime):
    """One that takes its time to read what there is."""

    async def start(self, wake: Callable[[str], None]) -> None:
        await asyncio.sleep(3 * LEASE_SECONDS)
        await super().start(wake)


def the_lease(kube: KubeServer) -> dict[str, Any]:
    found = kube.get("leases", NAME)
    assert found is not None
    spec: dict[str, Any] = found["spec"]
    return spec


def test_one_of_two_operators_acts_and_the_other_takes_over_when_it_lets_go() -> None:
    async def story(kube: KubeServer) -> None:
        runtime = FakeRuntime()
        async with operating(kube, runtime, identity="one", duration=LEASE_SECONDS) as one:
            await eventually(lambda: one.operator.controller)
            async with operating(kube, runtime, identity="two", duration=LEASE_SECONDS) as two:
                instance = instance_of(kube.create(by_hand(), "u-ann"))
                await eventually(lambda: runtime.running(instance) == [0, 1])
                assert two.operator.controller is None
                assert the_lease(kube)["holderIdentity"] == "one"
                one.stop.set()
                await one.task
                await eventually(lambda: two.operator.controller)
                assert the_lease(kube)["holderIdentity"] == "two"
                runtime.exit(instance, 0, 0)
                runtime.exit(instance, 1, 0)
                await two.until(instance, lambda d: d.status.settled)
        assert len(runtime.launches) == 2

    tell(story)


def test_an_operator_whose_lease_was_taken_stops_and_leads_again_when_it_is_free() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, duration=LEASE_SECONDS) as here:
            await eventually(lambda: here.operator.controller)
            await here.api.merge_patch(
                f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}",
                {"spec": {"holderIdentity": "usurper"}},
            )
            await eventually(lambda: here.operator.controller is None)
            assert the_lease(kube)["holderIdentity"] == "usurper"
            await eventually(lambda: here.operator.controller)
            assert the_lease(kube)["holderIdentity"] == "one"
            instance = instance_of(kube.create(by_hand(), "u-ann"))
            await eventually(lambda: here.runtime.running(instance) == [0, 1])

    tell(story)


def test_an_operator_that_cannot_renew_stops_before_another_one_may_begin() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, duration=LEASE_SECONDS) as one:
            await eventually(lambda: one.operator.controller)
            kube.fail("patch", "leases", status=503, times=10_000)
            kube.fail("get", "leases", status=503, times=10_000)
            started = asyncio.get_running_loop().time()
            await eventually(lambda: one.operator.controller is None)
            assert asyncio.get_running_loop().time() - started < STORY_LIMIT
            kube.heal()
            await eventually(lambda: one.operator.controller)

    tell(story)


def test_an_operator_that_loses_its_lease_leaves_turns_that_hang() -> None:
    class Hangs(FakeRuntime):
        def __init__(self) -> None:
            super().__init__()
            self.left = 0

        async def observe(self, run: Run) -> Sighting:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
            raise AssertionError

    async def story(kube: KubeServer) -> None:
        runtime = Hangs()
        async with operating(kube, runtime, duration=LEASE_SECONDS) as here:
            kube.create(by_hand(), "u-ann")
            await eventually(lambda: here.operator.controller and here.operator.controller.turns)
            await here.api.merge_patch(
                f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}",
                {"spec": {"holderIdentity": "usurper"}},
            )
            await eventually(lambda: runtime.left)
            assert the_lease(kube)["holderIdentity"] == "usurper"
            assert not here.task.done()

    tell(story)


def test_an_operator_that_cannot_stop_ends() -> None:
    class Stays(FakeRuntime):
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def story(kube: KubeServer) -> None:
        async with operating(kube, Stays(), duration=LEASE_SECONDS) as here:
            await eventually(lambda: here.operator.controller)
            await here.api.merge_patch(
                f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}",
                {"spec": {"holderIdentity": "usurper"}},
            )
            with pytest.raises(CannotLetGo):
                await here.task
            assert the_lease(kube)["holderIdentity"] == "usurper"

    tell(story)


def test_a_leader_keeps_its_lease_while_it_reads_what_there_is() -> None:
    async def story(kube: KubeServer) -> None:
        instance = instance_of(kube.create(by_hand(), "u-ann"))
        runtime = SlowRuntime()
        async with (
            operating(kube, runtime, identity="one", duration=LEASE_SECONDS),
            operating(kube, runtime, identity="two", duration=LEASE_SECONDS),
        ):
            await eventually(lambda: runtime.running(instance) == [0, 1])
            assert the_lease(kube)["leaseTransitions"] == 0

    tell(story)


def test_a_lease_is_taken_over_only_when_it_was_seen_not_to_change_for_its_whole_time() -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url) as api:
            holder, clock = an_election(api, "holder"), Clock()
            assert await holder._try()
            candidate = an_election(api, "candidate", clock)
            assert not await candidate._try()
            clock.now += 14.0
            assert not await candidate._try()
            assert await holder._renew()
            clock.now += 14.0
            assert not await candidate._try()  # it has changed: the time counts anew
            clock.now += 14.9
            assert not await candidate._try()
            clock.now += 0.2
            assert await candidate._try()
            assert the_lease(kube)["holderIdentity"] == "candidate"
            assert the_lease(kube)["leaseTransitions"] == 1
            assert await holder._renew()
            assert not holder.leading

    tell(story)


@pytest.mark.parametrize("renewed", ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
def test_a_holder_whose_clock_is_wrong_is_neither_robbed_nor_kept_for_ever(renewed: str) -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url) as api:
            assert await an_election(api, "holder")._try()
            path = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}"
            await api.merge_patch(path, {"spec": {"renewTime": renewed}})
            clock = Clock()
            candidate = an_election(api, "candidate", clock)
            assert not await candidate._try()
            clock.now += 14.0
            assert not await candidate._try()
            clock.now += 2.0
            assert await candidate._try()

    tell(story)


def test_of_many_candidates_at_once_one_wins() -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url) as api:
            candidates = [an_election(api, f"candidate-{n}") for n in range(10)]
            won = await asyncio.gather(*(candidate._try() for candidate in candidates))
            assert sum(won) == 1
            assert the_lease(kube)["holderIdentity"] == candidates[won.index(True)].identity

    tell(story)


def test_a_released_lease_is_free_at_once() -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url) as api:
            holder = an_election(api, "holder")
            assert await holder._try()
            await holder.release()
            assert await an_election(api, "next")._try()

    tell(story)


def test_a_renewal_whose_answer_was_lost_is_found_out() -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url) as api:
            holder = an_election(api, "holder")
            assert await holder._try()
            kube.fail("patch", "leases", status=0)
            assert not await holder._renew()
            assert await holder._renew()
            assert the_lease(kube)["holderIdentity"] == "holder"

    tell(story)
