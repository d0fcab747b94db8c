"""Runs through the API: started, resized, cancelled, started afresh, deleted."""

import asyncio
from typing import Any

import pytest

from basilica.core.errors import WorldSizeOutOfBounds
from basilica.core.spec import Exec, Shell
from basilica.ports import Limits
from tests.support.world import STORY_SECONDS, World, a_request, error_of, story

# ---- create ---------------------------------------------------------------------------------------------------------


@story
async def test_a_new_run_is_answered_with_all_that_the_official_client_needs(world: World) -> None:
    answer = await world.ann.post("/deployments", json=a_request("train", target=2))
    assert answer.status_code == 201
    body = answer.json()
    assert body["instanceName"].startswith("train-")
    assert body["friendlyName"] == "train"
    assert (body["userId"], body["namespace"]) == ("ann", "u-ann")
    assert (body["state"], body["phase"], body["url"]) == ("Pending", "pending", "")
    assert body["replicas"] == {"desired": 2, "ready": 0}
    gang = body["distributed"]
    assert gang["worldSize"] == {"ready": 0, "target": 2, "min": 1, "max": 8, "belowMinimum": True}
    assert (gang["generation"], gang["observedGeneration"], gang["settled"]) == (1, 0, False)
    assert gang["rankExits"] == []
    assert None not in [*body.values(), *gang.values()]


@story
async def test_a_script_gets_command_and_args_as_its_arguments(world: World) -> None:
    request = a_request("train", command=["one"], args=["two", "three"])
    instance = (await world.ann.post("/deployments", json=request)).json()["instanceName"]
    assert (await world.store.get(instance)).spec.program == Shell("train.sh", ("one", "two", "three"))


@story
async def test_without_a_script_the_command_is_executed_as_it_stands(world: World) -> None:
    request = a_request("train", command=["python", "-c", "print('a b')"], args=["x"])
    del request["distributed"]["command"]
    instance = (await world.ann.post("/deployments", json=request)).json()["instanceName"]
    assert (await world.store.get(instance)).spec.program == Exec(("python", "-c", "print('a b')", "x"))


@story
async def test_a_plain_deployment_is_a_gang_of_its_replicas(world: World) -> None:
    plain = {"instanceName": "web", "image": "nginx", "replicas": 3, "command": ["run"], "public": True}
    body = (await world.ann.post("/deployments", json=plain)).json()
    size = body["distributed"]["worldSize"]
    assert (size["min"], size["target"], size["max"]) == (3, 3, 3)
    spec = (await world.store.get(body["instanceName"])).spec
    assert (spec.max_restarts, spec.grace_seconds, spec.ttl_seconds, spec.port) == (0, 10.0, None, 18789)


@story
async def test_the_official_client_can_send_every_field_that_it_has(world: World) -> None:
    request: dict[str, Any] = {
        "instanceName": "n",
        "image": "img:1",
        "replicas": 2,
        "port": 1234,
        "args": ["--foo", "bar"],
        "env": {"A": "b"},
        "resources": {"cpu": "2", "memory": "4Gi", "gpus": {"count": 2, "model": ["H100"], "minGpuMemoryGb": 40}},
        "ttlSeconds": 99,
        "enableBilling": False,
        "distributed": {
            "enabled": True,
            "worldSize": {"min": 1, "target": 2, "max": 3},
            "rendezvous": {"backend": "etcd-v2"},
            "providerFilter": {"include": ["cyan"], "exclude": ["opal"]},
            "topologySpread": {"strategy": "provider-aware"},
            "nccl": {"env": {"NCCL_DEBUG": "WARN"}},
            "bench": {"mode": "on-start", "placement": "strict"},
            "command": "python -c 'print(1)'",
        },
    }
    answer = await world.ann.post("/deployments", json=request)
    spec = (await world.store.get(answer.json()["instanceName"])).spec
    assert (spec.resources.cpu, spec.resources.memory_bytes, spec.resources.gpus.count) == (2.0, 4 << 30, 2)
    assert spec.bench is not None
    assert (spec.bench.placement, spec.ttl_seconds, spec.nccl_env) == ("strict", 99, {"NCCL_DEBUG": "WARN"})


@story
async def test_with_the_bench_off_its_placement_is_ignored(world: World) -> None:
    request = a_request("train")
    request["distributed"]["bench"] = {"mode": "off", "placement": "nonsense"}
    assert (await world.ann.post("/deployments", json=request)).status_code == 201
    request["distributed"]["bench"]["mode"] = "on-start"
    request["instanceName"] = "other"
    error = error_of(await world.ann.post("/deployments", json=request), 400)
    assert error["details"] == {"field": "distributed.bench.placement"}


@story
async def test_an_image_is_mentioned_as_not_used_where_ranks_are_processes(world: World) -> None:
    await world.ann.post("/deployments", json=a_request("train", image="pytorch:2"))
    events = (await world.ann.get("/deployments/train/events")).json()["events"]
    assert "image 'pytorch:2' is not used: ranks are processes of this machine" in [e["message"] for e in events]


# ---- the same request again -----------------------------------------------------------------------------------------


@story
async def test_the_same_idempotency_key_gives_the_same_run(world: World) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = [await world.ann.post("/deployments", json=a_request(), headers=headers) for _ in range(2)]
    assert [a.status_code for a in answers] == [201, 201]
    assert len({a.json()["instanceName"] for a in answers}) == 1
    assert (await world.ann.get("/deployments")).json()["total"] == 1


@story
async def test_twenty_requests_at_once_with_one_key_make_one_run(world: World) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(
        *(world.ann.post("/deployments", json=a_request(), headers=headers) for _ in range(20))
    )
    assert {a.status_code for a in answers} == {201}
    assert len({a.json()["instanceName"] for a in answers}) == 1
    assert len(world.runtime.launches) <= 2


@story
async def test_an_idempotency_key_used_for_another_spec_is_a_conflict(world: World) -> None:
    headers = {"Idempotency-Key": "k1"}
    await world.ann.post("/deployments", json=a_request(target=1), headers=headers)
    error_of(await world.ann.post("/deployments", json=a_request(target=2), headers=headers), 409, "Conflict")


@story
async def test_another_user_may_use_the_same_idempotency_key(world: World) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = await world.ann.post("/deployments", json=a_request(), headers=headers)
    second = await world.bob.post("/deployments", json=a_request(), headers=headers)
    assert first.json()["instanceName"] != second.json()["instanceName"]


@pytest.mark.parametrize("key", ["", "x" * 201])
@story
async def test_an_idempotency_key_has_1_to_200_characters(world: World, key: str) -> None:
    answer = await world.ann.post("/deployments", json=a_request(), headers={"Idempotency-Key": key})
    error_of(answer, 400, "BASILICA_API_INVALID_REQUEST")


# ---- names and limits -----------------------------------------------------------------------------------------------


@story
async def test_the_name_of_a_live_run_is_taken_until_it_ends(world: World) -> None:
    first = await world.deploy("train", target=1)
    error = error_of(await world.ann.post("/deployments", json=a_request("train")), 409, "NameInUse")
    assert first in error["message"]
    await world.end(first, 0)
    second = await world.deploy("train", target=1)
    assert (await world.ann.get("/deployments/train")).json()["instanceName"] == second
    assert (await world.ann.get(f"/deployments/{first}")).json()["phase"] == "succeeded"


@story
async def test_another_users_live_run_does_not_take_the_name(world: World) -> None:
    await world.deploy("train", target=1)
    await world.deploy("train", target=1, who=world.bob)


def test_limits_say_what_there_is_and_what_was_asked_for() -> None:
    async def tell() -> None:
        async with World(limits=Limits(deployments=2, ranks=4)) as world:
            await world.deploy("a", target=1)
            error = error_of(await world.ann.post("/deployments", json=a_request("b", target=4)), 403, "QuotaExceeded")
            assert error["details"] == {"what": "ranks", "limit": 4, "current": 1, "requested": 4}
            assert "current=1, requested=4, limit=4" in error["message"]
            await world.deploy("b", target=1)
            error = error_of(await world.ann.post("/deployments", json=a_request("c", target=1)), 403, "QuotaExceeded")
            assert error["details"] == {"what": "deployments", "limit": 2, "current": 2, "requested": 1}
            answer = await world.ann.post("/deployments/b/scale-distributed", json={"target": 4})
            assert error_of(answer, 403, "QuotaExceeded")["details"]["requested"] == 3
            await world.deploy("c", target=4, who=world.bob)

    asyncio.run(asyncio.wait_for(tell(), STORY_SECONDS))


# ---- scale ----------------------------------------------------------------------------------------------------------


@story
async def test_the_answer_to_a_scale_shows_the_wish_and_its_generation(world: World) -> None:
    instance = await world.deploy(target=2)
    body = (await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 3})).json()
    assert body["distributed"]["worldSize"]["target"] == 3
    assert body["distributed"]["generation"] == 2
    done = await world.until(instance, lambda d: d.status.observed_generation == 2 and d.status.ready == 3)
    assert done.status.world_target == 3
    assert world.runtime.running(instance) == [0, 1, 2]


@story
async def test_scaling_down_stops_the_highest_ranks(world: World) -> None:
    instance = await world.deploy(target=3)
    await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 1})
    await world.until(instance, lambda d: world.runtime.running(instance) == [0])


@story
async def test_scaling_to_the_size_that_it_has_changes_nothing(world: World) -> None:
    instance = await world.deploy(target=2)
    body = (await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 2})).json()
    assert body["distributed"]["generation"] == 1


@pytest.mark.parametrize("target", [0, 9])
@story
async def test_a_size_out_of_bounds_is_refused_with_the_bounds(world: World, target: int) -> None:
    instance = await world.deploy(target=2)
    answer = await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": target})
    error = error_of(answer, 400, WorldSizeOutOfBounds.code)
    assert error["details"] == {"requested": target, "min": 1, "max": 8}


@story
async def test_an_ended_run_is_not_scaled_or_restarted(world: World) -> None:
    instance = await world.deploy(target=2)
    await world.end(instance, 0, 0)
    answer = await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 3})
    error = error_of(answer, 409, "UDTerminalState")
    assert error["details"] == {"phase": "succeeded", "requestedTarget": 3}
    error_of(await world.ann.post(f"/deployments/{instance}/restart", json={}), 409, "UDTerminalState")


@story
async def test_from_the_first_rank_that_finished_the_world_is_closed(world: World) -> None:
    instance = await world.deploy(target=2)
    world.runtime.exit(instance, 0, 0)
    await world.until(instance, lambda d: d.status.closed)
    answer = await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 3})
    assert error_of(answer, 409, "WorldClosed")["details"] == {"requestedTarget": 3}
    error_of(await world.ann.post(f"/deployments/{instance}/restart"), 409, "WorldClosed")
    answer = await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 2})
    assert answer.status_code == 200


# ---- cancel, restart, delete ----------------------------------------------------------------------------------------


@story
async def test_a_cancelled_run_keeps_its_record_and_cancelling_again_changes_nothing(world: World) -> None:
    instance = await world.deploy(target=2)
    assert (await world.ann.post(f"/deployments/{instance}/cancel")).status_code == 200
    await world.settled(instance)
    first = (await world.ann.get(f"/deployments/{instance}")).json()
    assert (first["phase"], first["state"]) == ("cancelled", "Cancelled")
    assert [(e["rank"], e["terminationReason"]) for e in first["distributed"]["rankExits"]] == [
        (0, "Cancelled"),
        (1, "Cancelled"),
    ]
    again = (await world.ann.post(f"/deployments/{instance}/cancel")).json()
    assert again["version"] == first["version"]


@story
async def test_cancelling_what_succeeded_leaves_it_a_success(world: World) -> None:
    instance = await world.deploy(target=1)
    await world.end(instance, 0)
    body = (await world.ann.post(f"/deployments/{instance}/cancel")).json()
    assert body["phase"] == "succeeded"


@story
async def test_a_restart_gives_every_rank_a_new_attempt(world: World) -> None:
    instance = await world.deploy(target=2)
    answer = await world.ann.post(f"/deployments/{instance}/restart", json={})
    assert answer.json()["distributed"]["generation"] == 2
    await world.until(instance, lambda d: d.status.observed_generation == 2 and d.status.ready == 2)
    assert {(rank, attempt) for _, rank, attempt in world.runtime.launches} == {(0, 0), (1, 0), (0, 1), (1, 1)}


@story
async def test_a_deleted_run_is_gone_and_its_usage_is_not(world: World) -> None:
    instance = await world.deploy(target=2)
    body = (await world.ann.delete(f"/deployments/{instance}", params={"wait": 20})).json()
    assert body == {"instanceName": instance, "state": "Deleted", "message": "deleted"}
    error_of(await world.ann.get(f"/deployments/{instance}"), 404, "BASILICA_API_NOT_FOUND")
    error_of(await world.ann.delete(f"/deployments/{instance}"), 404, "BASILICA_API_NOT_FOUND")
    assert [row["instanceName"] for row in (await world.ann.get("/usage")).json()["usage"]] == [instance]


@story
async def test_while_ranks_use_their_grace_period_a_deleted_run_is_terminating(world: World) -> None:
    instance = await world.deploy(target=1)
    world.runtime.stubborn = True
    body = (await world.ann.delete(f"/deployments/{instance}", params={"wait": 0})).json()
    assert body["state"] == "Terminating"
    assert (await world.ann.get(f"/deployments/{instance}")).json()["state"] == "Terminating"
    world.runtime.stubborn = False
    world.runtime.exit(instance, 0, 0)
    assert (await world.ann.delete(f"/deployments/{instance}", params={"wait": 20})).status_code in (200, 404)


@story
async def test_pruning_removes_the_users_own_ended_runs(world: World) -> None:
    done = await world.deploy("done", target=1)
    await world.end(done, 0)
    his = await world.deploy("his", target=1, who=world.bob)
    await world.end(his, 0)
    live = await world.deploy("live", target=1)
    assert (await world.ann.post("/prune", params={"older_than": 3600})).json() == {"deleted": []}
    assert (await world.ann.post("/prune")).json() == {"deleted": [done]}
    assert (await world.ann.get(f"/deployments/{live}")).status_code == 200
    assert (await world.bob.get(f"/deployments/{his}")).status_code == 200


# ---- ends -----------------------------------------------------------------------------------------------------------


@story
async def test_a_failed_run_names_its_culprit_and_every_exit(world: World) -> None:
    request = a_request(target=2, min=2)
    instance = (await world.ann.post("/deployments", json=request)).json()["instanceName"]
    await world.until(instance, lambda d: d.status.ready == 2)
    world.runtime.exit(instance, 1, 3)
    await world.settled(instance)
    body = (await world.ann.get(f"/deployments/{instance}")).json()
    assert (body["phase"], body["state"]) == ("failed", "Failed")
    gang = body["distributed"]
    assert (gang["culprit"]["rank"], gang["culprit"]["exitCode"]) == (1, 3)
    assert [(e["rank"], e["exitCode"], e["role"]) for e in gang["rankExits"]] == [
        (0, 143, "stopped"),
        (1, 3, "culprit"),
    ]


@story
async def test_exits_are_shown_when_the_run_is_over_and_not_before(world: World) -> None:
    instance = await world.deploy(target=2)
    world.runtime.exit(instance, 0, 0)
    await world.until(instance, lambda d: d.status.closed)
    assert (await world.ann.get(f"/deployments/{instance}")).json()["distributed"]["rankExits"] == []
    world.runtime.exit(instance, 1, 0)
    await world.settled(instance)
    exits = (await world.ann.get(f"/deployments/{instance}")).json()["distributed"]["rankExits"]
    assert [(e["rank"], e["exitCode"], e["terminationReason"]) for e in exits] == [
        (0, 0, "Completed"),
        (1, 0, "Completed"),
    ]


@story
async def test_a_run_that_finished_keeps_its_world_ready(world: World) -> None:
    instance = await world.deploy(target=2)
    await world.end(instance, 0, 0)
    size = (await world.ann.get(f"/deployments/{instance}")).json()["distributed"]["worldSize"]
    assert (size["ready"], size["belowMinimum"]) == (2, False)


@story
async def test_a_store_that_cannot_be_written_is_a_503_to_be_tried_again(world: World) -> None:
    instance = await world.deploy(target=1)
    world.memory.unavailable = "the disk is full"
    error = error_of(await world.ann.post("/deployments", json=a_request("b")), 503)
    assert (error["message"], error["retryable"]) == ("the disk is full", True)
    assert (await world.ann.get(f"/deployments/{instance}")).status_code == 200
    world.memory.unavailable = None
    assert (await world.ann.post("/deployments", json=a_request("b"))).status_code == 201
