"""Looking at runs and at the server: lists, events, why, ranks, usage, metrics, health, the OpenAPI document."""

from datetime import datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from basilica import __version__
from tests.support.world import World, a_request, error_of, story


@story
async def test_the_list_is_newest_first_and_enough_for_a_table(world: World) -> None:
    assert (await world.ann.get("/deployments")).json() == {"deployments": [], "total": 0}
    first = await world.deploy("a", target=1)
    second = await world.deploy("b", target=2)
    await world.end(first, 0)
    body = (await world.ann.get("/deployments")).json()
    assert body["total"] == 2
    assert [d["instanceName"] for d in body["deployments"]] == [second, first]
    summary = body["deployments"][1]
    assert (summary["friendlyName"], summary["state"], summary["phase"]) == ("a", "Succeeded", "succeeded")
    assert (summary["url"], summary["replicas"]) == ("", {"desired": 1, "ready": 1})
    assert {"createdAt", "finishedAt"} <= summary.keys()
    assert "finishedAt" not in body["deployments"][0]


@story
async def test_events_are_newest_first_in_the_words_that_the_official_client_reads(world: World) -> None:
    instance = await world.deploy(target=2)
    await world.end(instance, 0, 0)
    body = (await world.ann.get(f"/deployments/{instance}/events")).json()
    assert [e["reason"] for e in body["events"]] == ["Succeeded", "WorldReady", "Created"]
    first = body["events"][-1]
    assert first.keys() == {"type", "reason", "message", "count", "first_timestamp", "last_timestamp"}
    assert (first["type"], first["count"]) == ("Normal", 1)


@story
async def test_events_can_be_limited_and_resumed(world: World) -> None:
    instance = await world.deploy(target=2)
    path = f"/deployments/{instance}/events"
    newest = (await world.ann.get(path, params={"limit": 1})).json()
    assert [e["reason"] for e in newest["events"]] == ["WorldReady"]
    version = (await world.ann.get(path)).json()["version"]
    assert (await world.ann.get(path, params={"since": version})).json() == {"events": [], "version": version}
    await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 3})
    later = (await world.ann.get(path, params={"since": version})).json()
    assert "ScaleRequested" in [e["reason"] for e in later["events"]]
    assert "Created" not in [e["reason"] for e in later["events"]]
    assert later["version"] > version


@story
async def test_equal_events_are_counted_not_repeated(world: World) -> None:
    instance = await world.deploy(target=2)
    for target in (3, 2, 3):
        await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": target})
    events = (await world.ann.get(f"/deployments/{instance}/events")).json()["events"]
    requests = {e["message"]: e["count"] for e in events if e["reason"] == "ScaleRequested"}
    assert sorted(requests.values()) == [1, 2]
    assert [count for message, count in requests.items() if "3" in message] == [2]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=-1", "limit=x", "limit=1.5", "since=-1", "since=1e3", "since=9" * 30]
)
@story
async def test_junk_in_the_query_of_events_is_400(world: World, query: str) -> None:
    await world.deploy(target=1)
    error = error_of(await world.ann.get(f"/deployments/train/events?{query}"), 400, "BASILICA_API_INVALID_REQUEST")
    assert error["details"]["field"] in ("limit", "since")


@story
async def test_why_says_it_in_a_sentence_with_what_ranks_were_given(world: World) -> None:
    request = a_request("train", target=1, workdir="/work", env={"PATH": "/venv/bin:/bin", "VIRTUAL_ENV": "/venv"})
    instance = (await world.ann.post("/deployments", json=request)).json()["instanceName"]
    await world.until(instance, lambda d: d.status.ready == 1)
    sentence = (await world.ann.get("/deployments/train")).json()["distributed"]["blockedOn"]
    assert sentence.endswith("nothing to wait for")
    assert (await world.ann.get("/deployments/train/why")).json() == {
        "instanceName": instance,
        "friendlyName": "train",
        "phase": "ready",
        "why": sentence,
        "workdir": "/work",
        "path": "/venv/bin:/bin",
        "virtualEnv": "/venv",
    }


@story
async def test_ranks_have_a_phase_for_the_official_client_and_a_state_of_ours(world: World) -> None:
    instance = await world.deploy(target=2)
    world.runtime.exit(instance, 1, 0)
    await world.until(instance, lambda d: d.status.closed)
    ranks = (await world.ann.get(f"/deployments/{instance}/ranks")).json()["ranks"]
    assert [(r["rank"], r["phase"], r["state"], r["restarts"]) for r in ranks] == [
        (0, "Running", "running", 0),
        (1, "Succeeded", "succeeded", 0),
    ]
    assert [r["podName"] for r in ranks] == [f"{instance}-0", f"{instance}-1"]


@story
async def test_usage_is_paged(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.deploy(name, target=1)
    page = (await world.ann.get("/usage", params={"limit": 1, "offset": 1})).json()["usage"]
    assert [row["friendlyName"] for row in page] == ["b"]
    assert (await world.ann.get("/usage", params={"offset": 3})).json() == {"usage": []}
    for query in ("limit=0", "limit=1001", "offset=-1", "offset=99999999999"):
        error_of(await world.ann.get(f"/usage?{query}"), 400)


@story
async def test_metrics_are_prometheus_and_name_nobody(world: World) -> None:
    instance = await world.deploy("secret-project", target=2)
    await world.ann.get("/deployments/nobody")
    answer = await world.stranger.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["basilica_live_deployments", ("phase", "ready")] == 1
    assert samples["basilica_live_ranks", ("state", "running")] == 2
    missed = ("method", "GET"), ("route", "/deployments/{name}"), ("status", "404")
    assert samples[("basilica_http_requests_total", *missed)] == 1
    assert samples[("basilica_controller_turns_total",)] > 0
    assert "secret-project" not in answer.text
    assert "ann" not in answer.text.replace("planned", "")
    assert instance not in answer.text


@story
async def test_health_is_what_the_official_client_parses(world: World) -> None:
    body = (await world.stranger.get("/health")).json()
    assert body.keys() == {"status", "version", "timestamp", "healthy_validators", "total_validators"}
    assert (body["status"], body["version"]) == ("healthy", __version__)
    assert datetime.fromisoformat(body["timestamp"].replace("Z", "+00:00")).tzinfo is not None


@story
async def test_what_a_server_of_ones_own_does_not_have_is_said_kindly(world: World) -> None:
    await world.deploy("train", target=1)
    assert (await world.ann.get("/billing/balance")).json()["balance"] == "0"
    assert (await world.ann.get("/billing/usage?limit=5&offset=0")).json() == {"rentals": [], "total_count": 0}
    assert (await world.ann.get("/deployments/train/share-token")).json() == {"exists": False}
    assert (await world.ann.delete("/deployments/train/share-token")).json() == {"revoked": False}
    error_of(await world.ann.post("/deployments/train/share-token"), 409)
    assert (await world.ann.get("/deployments/train/enroll-metadata")).json() == {"publicMetadata": False}
    enroll = "/deployments/train/enroll-metadata"
    assert (await world.ann.post(enroll, json={"enabled": False})).json() == {"publicMetadata": False}
    error_of(await world.ann.post(enroll, json={"enabled": True}), 403)
    error_of(await world.ann.post(enroll, json={"enabled": "yes"}), 400)


@story
async def test_the_openapi_document_is_complete(world: World) -> None:
    document = (await world.stranger.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    create = document["paths"]["/deployments"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/CreateDeployment")
    problem = {"$ref": "#/components/schemas/Problem"}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["responses"]["404"]["content"]["application/json"]["schema"] == problem, where
            assert "422" not in operation["responses"], where
            is_open = path in ("/health", "/metrics") or path.startswith("/public/")
            assert ("security" in operation) != is_open, where
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    _assert_references_resolve(document, document)


def _assert_references_resolve(document: object, part: object) -> None:
    match part:
        case {"$ref": str(reference)}:
            found = document
            for step in reference.removeprefix("#/").split("/"):
                assert isinstance(found, dict)
                found = found[step]
        case dict():
            for value in part.values():
                _assert_references_resolve(document, value)
        case list():
            for value in part:
                _assert_references_resolve(document, value)
        case _:
            pass
