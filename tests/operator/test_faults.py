"""The API server is restarted, cuts watches, forgets versions, throttles and conflicts: nothing is lost or doubled."""

import asyncio
from dataclasses import replace

import pytest

from basilica.core.errors import StaleVersion, StoreUnavailable
from basilica.core.events import Event
from basilica.core.phase import Phase
from basilica.kube.client.api import ApiError
from basilica.kube.manifests.userdeployment import instance_of
from basilica.testing.store_contract import a_run
from basilica_testkube import KubeServer
from tests.operator.cluster import by_hand, deleted, edit, eventually, operating, scaled, tell

WATCHED = "userdeployments"


def test_changes_that_came_while_the_watch_was_cut_are_seen() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = instance_of(kube.create(by_hand(), "u-ann"))
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            for target in (3, 4, 5):
                await eventually(lambda: kube.cut_watches(WATCHED))
                assert edit(kube, scaled(target)).status_code == 200
                await eventually(lambda target=target: here.runtime.running(instance) == list(range(target)))  # type: ignore[misc]

    tell(story)


def test_changes_that_the_server_has_forgotten_are_found_by_listing_again() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            gone = instance_of(kube.create(by_hand("gone"), "u-ann"))
            kept = instance_of(kube.create(by_hand("kept"), "u-ann"))
            await eventually(lambda: here.runtime.running(gone) and here.runtime.running(kept))
            await here.ready(gone, 2)
            await here.ready(kept, 2)
            kube.fail("watch", WATCHED, status=503, times=3)
            kube.cut_watches(WATCHED)
            assert edit(kube, scaled(4), "kept").status_code == 200
            deleted(kube, "gone")
            new = instance_of(kube.create(by_hand("new"), "u-ann"))
            kube.compact()
            await eventually(lambda: here.runtime.running(kept) == [0, 1, 2, 3])
            await eventually(lambda: here.runtime.running(new) == [0, 1])
            await eventually(lambda: kube.get("userdeployments", "gone", "u-ann") is None)
            assert here.runtime.running(gone) == []

    tell(story)


def test_a_watch_that_is_told_gone_begins_again() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = instance_of(kube.create(by_hand(), "u-ann"))
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            assert kube.expire_watches(WATCHED) == 1
            assert edit(kube, scaled(3)).status_code == 200
            await eventually(lambda: here.runtime.running(instance) == [0, 1, 2])

    tell(story)


def test_the_operator_goes_on_after_an_outage_of_the_api_server() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, duration=15.0) as here:
            instance = instance_of(kube.create(by_hand(), "u-ann"))
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            await here.ready(instance, 2)
            with kube.outage():
                here.runtime.exit(instance, 0, 0)
                here.runtime.exit(instance, 1, 0)
                await eventually(lambda: here.store.behind)
                assert (await here.store.get(instance)).status.phase is Phase.READY
            ended = await here.until(instance, lambda d: d.status.settled)
            assert ended.status.phase is Phase.SUCCEEDED
            assert [e.exit_code for e in ended.status.exits] == [0, 0]
            await eventually(lambda: here.store.behind is None)

    tell(story)


@pytest.mark.parametrize("status", [409, 429, 500, 503, 0])
def test_writes_that_are_refused_throttled_or_lost_are_made_in_the_end(status: int) -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            kube.fail("patch", "userdeployments*", status=status, times=3, retry_after=1 if status == 429 else None)
            instance = instance_of(kube.create(by_hand(), "u-ann"))
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            await here.ready(instance, 2)
            assert len(here.runtime.launches) == 2

    tell(story)


def test_a_status_whose_answer_was_lost_counts_as_saved() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, identity="idle") as here:
            here.stop.set()
            await here.task
            made = await here.store.create(a_run(), [Event("Created", "it was created")])
            real = here.api.merge_patch

            async def lossy(path: str, body: dict[str, object]) -> dict[str, object]:
                await real(path, body)
                here.api.merge_patch = real  # type: ignore[method-assign]
                kube.fail("patch", "*", status=0)
                return await real(path, body)

            here.api.merge_patch = lossy  # type: ignore[method-assign]
            saved = await here.store.save_status(made, replace(made.status, message="new"), now=5.0)
            assert saved.status.message == "new"
            assert await here.store.get("train-1") == saved

    tell(story)


def test_a_conflict_is_answered_with_what_is_newer() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, identity="idle") as here:
            here.stop.set()
            await here.task
            made = await here.store.create(a_run())
            kube.fail("watch", WATCHED, status=503, times=10_000)
            kube.cut_watches(WATCHED)
            assert edit(kube, scaled(5), "train-1").status_code == 200
            with pytest.raises(StaleVersion):
                await here.store.save_status(made, replace(made.status, message="late"), now=1.0)
            assert (await here.store.get("train-1")).spec.world.target == 5
            assert edit(kube, scaled(6), "train-1").status_code == 200
            changed = await here.store.change_spec("train-1", lambda d: d.spec.scaled(d.spec.world.target + 1))
            assert changed.spec.world.target == 7

    tell(story)


def test_a_create_while_the_api_server_is_away_changes_nothing() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, identity="idle", duration=15.0) as here:
            here.stop.set()
            await here.task
            with kube.outage(), pytest.raises(StoreUnavailable):
                await here.store.create(a_run())
            assert kube.objects("userdeployments", "u-ann") == []
            await here.store.create(a_run())

    tell(story)


def test_a_create_whose_answer_was_lost_has_made_one_run() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube, identity="idle") as here:
            here.stop.set()
            await here.task
            real = here.api.create

            async def lossy(path: str, body: dict[str, object]) -> dict[str, object]:
                made = await real(path, body)
                if body["kind"] == "UserDeployment":
                    raise ApiError(0, "Unreachable", "the answer was lost")
                return made

            here.api.create = lossy  # type: ignore[method-assign]
            made = await here.store.create(a_run())
            assert made == await here.store.get("train-1")
            assert len(kube.objects("userdeployments", "u-ann")) == 1
            here.api.create = real  # type: ignore[method-assign]
            kube.fail("create", "userdeployments", status=500)
            with pytest.raises(StoreUnavailable, match="the test said so"):
                await here.store.create(a_run("other-1", name="other"))
            await here.store.create(a_run("other-2", name="other"))

    tell(story)


def test_a_create_that_ended_halfway_is_made_good_by_the_next() -> None:
    """The ticket was taken, and the server died before it made the run."""

    async def story(kube: KubeServer) -> None:
        async with operating(kube, identity="idle") as here:
            here.stop.set()
            await here.task
            kube.fail("create", "userdeployments", status=403)
            with pytest.raises(StoreUnavailable, match="rights"):
                await here.store.create(a_run())
            made = await here.store.create(a_run())
            assert made.instance == "train-1"

    tell(story)


def test_two_servers_at_once_give_a_name_once_and_keep_the_limits() -> None:
    async def story(kube: KubeServer) -> None:
        from basilica.kube.client.api import KubeApi
        from basilica.ports import Limits
        from basilica.stores.kubernetes import KubernetesStore

        async with KubeApi(kube.url) as api:
            stores = [KubernetesStore(api) for _ in range(3)]
            for store in stores:
                await store.open()
            same = await asyncio.gather(
                *(store.create(a_run(f"same-{n}")) for n, store in enumerate(stores * 4)), return_exceptions=True
            )
            assert sum(not isinstance(result, BaseException) for result in same) == 1, same
            limits = Limits(ranks=10)
            many = await asyncio.gather(
                *(
                    store.create(a_run(f"many-{n}", name=f"many-{n}", target=2), limits=limits)
                    for n, store in enumerate(stores * 4)
                ),
                return_exceptions=True,
            )
            assert sum(not isinstance(result, BaseException) for result in many) == 4, many
            for store in stores:
                await store.close()

    tell(story)
