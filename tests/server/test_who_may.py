"""Who may do what: keys, users, and what belongs to somebody else."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from basilica.server.auth import key_record
from basilica.stores.sqlite.keys import SqliteKeys
from basilica.stores.sqlite.store import SqliteStore
from tests.support.world import STORY_SECONDS, World, a_request, error_of, key_of, story

OF_A_RUN = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/scale-distributed"),
    ("POST", "/cancel"),
    ("POST", "/restart"),
    ("GET", "/watch"),
    ("GET", "/watch?wait=5"),
    ("GET", "/why"),
    ("GET", "/ranks"),
    ("GET", "/events"),
    ("GET", "/logs"),
    ("GET", "/logs?follow=true"),
    ("GET", "/share-token"),
    ("POST", "/share-token"),
    ("DELETE", "/share-token"),
    ("GET", "/enroll-metadata"),
    ("POST", "/enroll-metadata"),
]
OF_AN_ACCOUNT = [
    ("GET", "/deployments"),
    ("POST", "/deployments"),
    ("POST", "/prune"),
    ("GET", "/usage"),
    ("GET", "/billing/balance"),
    ("GET", "/billing/usage"),
]
BODIES = {"/scale-distributed": {"target": 2}, "/enroll-metadata": {"enabled": False}, "/deployments": a_request()}


async def ask(client: httpx2.AsyncClient, method: str, path: str) -> httpx2.Response:
    body = next((body for end, body in BODIES.items() if path.endswith(end) and method == "POST"), None)
    return await client.request(method, path, json=body)


@pytest.mark.parametrize(("method", "path"), OF_A_RUN)
@story
async def test_another_users_run_does_not_exist(world: World, method: str, path: str) -> None:
    instance = await world.deploy("train", target=1)
    for name in (instance, "train"):
        error_of(await ask(world.bob, method, f"/deployments/{name}{path}"), 404, "BASILICA_API_NOT_FOUND")
    before = await world.store.get(instance)
    assert (before.spec.generation, before.status.phase) == (1, "ready")


@pytest.mark.parametrize(("method", "path"), [*((m, "/deployments/x" + p) for m, p in OF_A_RUN), *OF_AN_ACCOUNT])
@story
async def test_without_a_key_nothing_is_answered(world: World, method: str, path: str) -> None:
    answer = await ask(world.stranger, method, path)
    error = error_of(answer, 401, "BASILICA_API_AUTH_MISSING")
    assert "Authorization: Bearer KEY" in error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Bearer wrong", "BASILICA_API_AUTH_ERROR"),
        ("Bearer " + "x" * 100_000, "BASILICA_API_AUTH_ERROR"),
        ("Bearer \xff\xfe", "BASILICA_API_AUTH_ERROR"),
        ("Bearer key-of-ann extra", "BASILICA_API_AUTH_ERROR"),
        ("Bearer ", "BASILICA_API_AUTH_MISSING"),
        ("Bearer", "BASILICA_API_AUTH_MISSING"),
        ("Basic YW5uOmFubg==", "BASILICA_API_AUTH_MISSING"),
        ("key-of-ann", "BASILICA_API_AUTH_MISSING"),
    ],
)
@story
async def test_a_key_that_is_none_is_refused(world: World, header: str, code: str) -> None:
    answer = await world.stranger.get("/deployments", headers={b"Authorization": header.encode("latin-1")})
    assert header[7:] not in error_of(answer, 401, code)["message"] or not header[7:]


@story
async def test_the_word_bearer_may_be_written_in_any_case(world: World) -> None:
    answer = await world.stranger.get("/deployments", headers={"Authorization": "bEARER  key-of-ann "})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json"])
@story
async def test_what_says_nothing_about_anybody_needs_no_key(world: World, path: str) -> None:
    assert (await world.stranger.get(path)).status_code == 200
    assert (await world.ann.get(path)).status_code == 200


@story
async def test_public_metadata_is_not_there_with_or_without_a_key(world: World) -> None:
    instance = await world.deploy(target=1)
    for client in (world.stranger, world.ann):
        error_of(await client.get(f"/public/deployments/{instance}/metadata"), 404, "BASILICA_API_NOT_FOUND")


@story
async def test_everybody_lists_their_own(world: World) -> None:
    hers = await world.deploy("train", target=1)
    his = await world.deploy("train", target=1, who=world.bob)
    for client, instance in ((world.ann, hers), (world.bob, his)):
        body = (await client.get("/deployments")).json()
        assert [d["instanceName"] for d in body["deployments"]] == [instance]
        assert body["total"] == 1
        assert [row["instanceName"] for row in (await client.get("/usage")).json()["usage"]] == [instance]


@story
async def test_a_key_works_until_it_is_revoked(world: World) -> None:
    record = key_record("second-key", "ann", 2.0)
    async with world.client("second-key") as client:
        error_of(await client.get("/deployments"), 401)
        await world.keys.add_key(record)
        assert (await client.get("/deployments")).status_code == 200
        await world.keys.revoke_key(record.id)
        error_of(await client.get("/deployments"), 401, "BASILICA_API_AUTH_ERROR")


# ---- secrets --------------------------------------------------------------------------------------------------------

MARKER = "hunter2-marker"


def test_secrets_and_env_values_appear_in_no_answer_event_or_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret: dict[str, Any] = {
        "env": {"MY_TOKEN": MARKER, "PLAIN": MARKER},
        "secrets": {"PASSWORD": MARKER},
    }

    async def tell() -> list[str]:
        store, keys = SqliteStore(tmp_path / "basilica.db"), SqliteKeys(tmp_path / "basilica.db")
        await store.open()
        await keys.open()
        said: list[str] = []
        async with World(store=store, keys=keys) as world:
            request = a_request("train", target=2, min=2, **secret)
            request["distributed"]["nccl"] = {"env": {"NCCL_TOKEN": MARKER}}
            headers = {"Idempotency-Key": "k"}
            for body, extra in (
                (request, headers),
                (request | {"image": "other"}, headers),
                (request | {"instanceName": "Bad Name"}, {}),
                ({k: v for k, v in request.items() if k != "instanceName"}, {}),
                (secret, {}),
                (request | {"env": [MARKER]}, {}),
                (request | {"secrets": {"A": MARKER + "\0"}}, {}),
                (request | {"secrets": {"A": 5, "B": MARKER}}, {}),
                (request | {"distributed": [request["distributed"]]}, {}),
                ([secret], {}),
                (request, {}),
            ):
                answer = await world.ann.post("/deployments", json=body, headers=extra)
                said.append(answer.text)
            broken = await world.ann.post("/deployments", content=b'{"env": {"A": "' + MARKER.encode() + b'"')
            said.append(broken.text)
            instance = (await world.ann.get("/deployments/train")).json()["instanceName"]
            await world.until(instance, lambda d: d.status.ready == 2)
            world.runtime.broken = True
            world.controller.wake(instance)
            for path in ("", "/why", "/ranks", "/events", "/logs", "/watch?wait=0"):
                said.append((await world.ann.get(f"/deployments/train{path}")).text)
            world.runtime.broken = False
            await world.end(instance, 1, 1)
            for path in ("", "/why", "/ranks", "/events", "/logs", "/watch", "/logs?follow=true"):
                said.append((await world.ann.get(f"/deployments/train{path}")).text)
            for path in ("/deployments", "/usage", "/metrics", "/openapi.json", "/billing/usage"):
                said.append((await world.ann.get(path)).text)
        await keys.close()
        await store.close()
        return said

    said = asyncio.run(asyncio.wait_for(tell(), STORY_SECONDS))
    assert len(said) > 20
    assert [text for text in said if MARKER in text] == []
    assert [
        record for record in caplog.records if MARKER in record.getMessage() or MARKER in str(record.exc_text)
    ] == []
    assert key_of("ann") not in "".join(said) + caplog.text
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file for file in files if key_of("ann").encode() in file.read_bytes()] == []
