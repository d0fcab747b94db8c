"""What people do with kubectl, and what the operator makes of it."""

import asyncio
from typing import Any

import pytest

from basilica.core.errors import DeploymentNotFound
from basilica.core.phase import Phase
from basilica.kube.manifests.userdeployment import FINALIZER, instance_of
from basilica_testkube import KubeServer
from tests.operator.cluster import by_hand, deleted, edit, eventually, kube_events, operating, scaled, tell, the_object


def applied(kube: KubeServer, **more: Any) -> str:
    """Make a run by hand; its instance name."""
    return instance_of(kube.create(by_hand(**more), "u-ann"))


def test_a_run_made_by_hand_becomes_ready_and_succeeds() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            await here.ready(instance, 2)
            status = the_object(kube)["status"]
            assert status["phase"] == "ready"
            assert status["world"] == {"ready": 2, "target": 2, "min": 1, "max": 8, "belowMinimum": False}
            assert status["observedGeneration"] == 1
            assert {c["type"]: c["status"] for c in status["conditions"]}["Ready"] == "True"
            assert the_object(kube)["metadata"]["finalizers"] == [FINALIZER]
            for rank in (0, 1):
                here.runtime.exit(instance, rank, 0)
            await here.until(instance, lambda d: d.status.settled)
            assert the_object(kube)["status"]["phase"] == "succeeded"
            await eventually(lambda: {"WorldReady", "Succeeded"} <= kube_events(kube).keys())

    tell(story)


def test_a_run_is_scaled_by_an_edit_of_its_spec() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            for target in (4, 2):
                assert edit(kube, scaled(target)).status_code == 200
                await eventually(lambda target=target: here.runtime.running(instance) == list(range(target)))  # type: ignore[misc]
                await here.ready(instance, target)
            assert the_object(kube)["metadata"]["generation"] == 3
            assert the_object(kube)["status"]["observedGeneration"] == 3

    tell(story)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (scaled(9), "target must not be greater than max"),
        (scaled(0), "greater than or equal to 1"),
        ({"spec": {"distributed": {"worldSize": {"min": 2}}}}, "min and max stand"),
        ({"spec": {"image": "other"}}, "image cannot be changed"),
        ({"spec": {"distributed": {"maxRestarts": 3}}}, "maxRestarts cannot be changed"),
        ({"spec": {"env": {"A": "1"}}}, "env cannot be changed"),
    ],
)
def test_what_may_not_be_changed_is_refused_by_the_api_server(change: dict[str, Any], told: str) -> None:
    async def story(kube: KubeServer) -> None:
        applied(kube)
        refused = edit(kube, change)
        assert refused.status_code == 422
        assert told in refused.json()["message"]

    tell(story)


def test_a_cancel_is_an_edit_that_cannot_be_taken_back() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await here.ready(await _known(here, instance), 2)
            assert edit(kube, {"spec": {"cancel": True}}).status_code == 200
            ended = await here.until(instance, lambda d: d.status.settled)
            assert ended.status.phase is Phase.CANCELLED
            assert here.runtime.running(instance) == []
            assert "stays cancelled" in edit(kube, {"spec": {"cancel": False}}).json()["message"]

    tell(story)


def test_an_edit_of_a_finished_run_is_ignored_with_a_warning() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await here.ready(await _known(here, instance), 2)
            for rank in (0, 1):
                here.runtime.exit(instance, rank, 0)
            await here.until(instance, lambda d: d.status.settled)
            assert edit(kube, scaled(5)).status_code == 200
            warning = await eventually(lambda: kube_events(kube).get("UDTerminalState"))
            assert warning["type"] == "Warning"
            assert "has no effect" in warning["message"]
            after = await here.until(instance, lambda d: d.status.ignored_generation == 2)
            assert after.status.phase is Phase.SUCCEEDED
            shown = the_object(kube)["status"]
            assert (shown["observedGeneration"], shown["world"]["target"]) == (1, 2), "a target that never was"
            assert [(e["rank"], e["exitCode"]) for e in shown["rankExits"]] == [(0, 0), (1, 0)]
            assert here.runtime.running(instance) == []

    tell(story)


def test_a_deleted_run_is_stopped_and_recorded_before_it_goes() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await here.ready(await _known(here, instance), 2)
            deleted(kube)
            await eventually(lambda: kube.get("userdeployments", "train", "u-ann") is None)
            assert here.runtime.running(instance) == []
            await here.until_forgotten(instance)
            (row,) = await here.store.usage("ann")
            assert row.instance == instance
            assert row.ended_at is not None

    tell(story)


def test_what_was_deleted_while_no_operator_ran_is_cleaned_up_by_the_next() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await here.ready(await _known(here, instance), 2)
            runtime = here.runtime
        deleted(kube)
        assert the_object(kube)["metadata"]["deletionTimestamp"]
        async with operating(kube, runtime, identity="two"):
            await eventually(lambda: kube.get("userdeployments", "train", "u-ann") is None)
            assert runtime.running(instance) == []

    tell(story)


def test_a_name_is_used_again_and_again() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instances = []
            for _ in range(3):
                instances.append(applied(kube))
                await here.ready(await _known(here, instances[-1]), 2)
                deleted(kube)
                await eventually(lambda: kube.get("userdeployments", "train", "u-ann") is None)
            assert len(set(instances)) == 3
            assert {row.instance for row in await here.store.usage("ann")} == set(instances)

    tell(story)


def test_runs_of_one_name_in_two_namespaces_are_two_runs() -> None:
    async def story(kube: KubeServer) -> None:
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "u-bob"}}, "")
        async with operating(kube) as here:
            anns = applied(kube)
            bobs = instance_of(kube.create(by_hand(namespace="u-bob"), "u-bob"))
            assert anns != bobs
            for instance, user in ((anns, "ann"), (bobs, "bob")):
                found = await here.ready(await _known(here, instance), 2)
                assert found.user == user
            assert (await here.store.find("u-bob", "train")).instance == bobs

    tell(story)


def test_what_the_schema_lets_pass_and_is_no_run_is_answered_on_the_object() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube, resources={"memory": "lots"})
            refused = await eventually(lambda: (the_object(kube).get("status") or {}).get("conditions"))
            assert (refused[0]["type"], refused[0]["status"], refused[0]["reason"]) == (
                "Accepted",
                "False",
                "InvalidSpec",
            )
            assert "resources.memory" in refused[0]["message"]
            event = await eventually(lambda: kube_events(kube).get("InvalidSpec"))
            assert event["type"] == "Warning"
            with pytest.raises(DeploymentNotFound):
                await here.store.get(instance)
            good = applied(kube, name="good")
            await here.ready(await _known(here, good), 2)
            deleted(kube)
            assert kube.get("userdeployments", "train", "u-ann") is None

    tell(story)


def test_a_secret_that_is_not_there_is_told_and_waited_for() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube, secretRef={"name": "tokens"})
            event = await eventually(lambda: kube_events(kube).get("SecretUnavailable"))
            assert "u-ann/tokens" in event["message"]
            shown = await eventually(lambda: the_object(kube).get("status"))
            assert shown["phase"] == "pending"
            assert "u-ann/tokens" in shown["message"]
            assert [(c["type"], c["status"]) for c in shown["conditions"]] == [("SecretAvailable", "False")]
            secret = {"metadata": {"name": "tokens"}, "data": {"TOKEN": "czNjcmV0"}}
            kube.create({"apiVersion": "v1", "kind": "Secret", **secret}, "u-ann")
            await eventually(lambda: here.runtime.running(instance) == [0, 1])
            assert (await here.store.get(instance)).spec.secrets == {"TOKEN": "s3cret"}
            ready = await eventually(lambda: the_object(kube)["status"]["phase"] == "ready" and the_object(kube))
            assert "SecretAvailable" not in [c["type"] for c in ready["status"]["conditions"]]
            assert "s3cret" not in str(the_object(kube))

    tell(story)


def test_a_namespace_that_is_deleted_goes_with_its_runs() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await here.ready(await _known(here, instance), 2)
            await here.api.delete("/api/v1/namespaces/u-ann")
            await eventually(lambda: kube.get("namespaces", "u-ann", "") is None)
            assert here.runtime.running(instance) == []

    tell(story)


def test_a_status_that_somebody_spoilt_stops_nothing_else() -> None:
    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance = applied(kube)
            await here.ready(await _known(here, instance), 2)
            assert edit(kube, {"status": {"state": "{nonsense"}}, subresource="status").status_code == 200
            good = applied(kube, name="good")
            await here.ready(await _known(here, good), 2)
            assert here.runtime.running(instance) == [0, 1]

    tell(story)


def test_operators_that_end_in_the_middle_of_their_work_lose_and_double_nothing() -> None:

    async def story(kube: KubeServer) -> None:
        async with operating(kube) as here:
            instance, runtime = applied(kube), here.runtime
            await eventually(lambda: here.runtime.launches)
            here.task.cancel()
            await asyncio.gather(here.task, return_exceptions=True)
        for number, target in enumerate((4, 3, 5)):
            assert edit(kube, scaled(target)).status_code == 200
            async with operating(kube, runtime, identity=f"next-{number}") as here:
                await eventually(lambda target=target: runtime.running(instance) == list(range(target)))  # type: ignore[misc]
                here.task.cancel()
                await asyncio.gather(here.task, return_exceptions=True)
        async with operating(kube, runtime, identity="last") as here:
            await here.ready(instance, 5)
            assert len(runtime.launches) == len(set(runtime.launches))
            for rank in range(5):
                runtime.exit(instance, rank, 0)
            ended = await here.until(instance, lambda d: d.status.settled)
            assert ended.status.phase is Phase.SUCCEEDED
            assert sorted(e.rank for e in ended.status.exits) == [0, 1, 2, 3, 4]

    tell(story)


async def _known(here: Any, instance: str) -> str:
    """The instance, once the store has been told of it."""

    def look() -> bool:
        try:
            here.store._cluster.known(instance)
        except DeploymentNotFound:
            return False
        return True

    await eventually(look)
    return instance
