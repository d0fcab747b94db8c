"""The client and its informer against the test cluster: retries, throttling, lost connections, forgotten history."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from basilica.kube.client.access import ConfigurationError, TokenFile, in_cluster
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.informer import Informer
from basilica_testkube import KubeServer

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer(processes=False) as server:
        yield server


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {"of": name}}, "data": data}


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def following(api: KubeApi, **more: Any) -> AsyncIterator[Informer]:
    informer = Informer(api, MAPS, **more)
    await informer.synced()
    try:
        yield informer
    finally:
        await informer.close()


def test_objects_are_written_changed_and_deleted(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api:
            made = await api.create(MAPS, config_map("a", x="1"))
            changed = await api.merge_patch(f"{MAPS}/a", {"data": {"y": "2"}})
            assert changed["data"] == {"x": "1", "y": "2"}
            await api.apply(f"{MAPS}/b", config_map("b", z="3"))
            found, _ = await api.list(MAPS, label_selector="of in (a, b)", limit=1)
            assert [obj["metadata"]["name"] for obj in found] == ["a", "b"]
            assert {obj["kind"] for obj in found} == {"ConfigMap"}
            with pytest.raises(ApiError) as stale:
                await api.merge_patch(
                    f"{MAPS}/a", {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}
                )
            assert stale.value.status == 409
            with pytest.raises(ApiError) as another:
                await api.delete(f"{MAPS}/a", uid="another")
            assert another.value.status == 409
            assert await api.delete(f"{MAPS}/a", uid=made["metadata"]["uid"])
            assert not await api.delete(f"{MAPS}/a")
            with pytest.raises(ApiError) as gone:
                await api.get(f"{MAPS}/a")
            assert (gone.value.status, gone.value.reason) == (404, "NotFound")

    asyncio.run(story())


def test_throttling_is_waited_out_and_a_lost_answer_is_asked_for_again(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api:
            kube.fail("create", "configmaps", status=429, times=2, retry_after=0)
            await api.create(MAPS, config_map("a"))
            kube.fail("get", "configmaps", status=0, times=2)
            assert (await api.get(f"{MAPS}/a"))["metadata"]["name"] == "a"
            kube.fail("get", "configmaps", status=503)
            assert (await api.get(f"{MAPS}/a"))["metadata"]["name"] == "a"
            kube.fail("create", "configmaps", status=0)
            with pytest.raises(ApiError) as lost:
                await api.create(MAPS, config_map("b"))
            assert lost.value.status == 0
            assert lost.value.transient

    asyncio.run(story())


def test_a_server_that_is_away_is_an_error_that_names_what_was_asked() -> None:
    async def story() -> None:
        async with KubeApi("http://127.0.0.1:1") as api:
            with pytest.raises(ApiError, match="no answer for /api/v1/nodes"):
                await api.get("/api/v1/nodes")

    asyncio.run(story())


def test_an_informer_follows_through_cuts_and_forgotten_history(kube: KubeServer) -> None:
    async def story() -> None:
        told: list[str] = []
        async with (
            KubeApi(kube.url) as api,
            following(api, on_change=lambda obj: told.append(obj["metadata"]["name"])) as informer,
        ):
            await api.create(MAPS, config_map("a"))
            await until(lambda: informer.get("default", "a"))
            kube.cut_watches()
            await api.create(MAPS, config_map("b"))
            await until(lambda: informer.get("default", "b"))
            kube.expire_watches()
            await api.create(MAPS, config_map("c"))
            await until(lambda: informer.get("default", "c"))
            with kube.outage():
                await until(lambda: informer.problem)
                kube.create(config_map("d"))
                kube.compact()
            await until(lambda: informer.get("default", "d") and informer.problem is None)
            await api.delete(f"{MAPS}/a")
            await until(lambda: informer.get("default", "a") is None)
            assert told == ["a", "b", "c", "d", "a"]

    asyncio.run(story())


def test_an_informer_is_well_again_before_anything_changes(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api, following(api) as informer:
            with kube.outage():
                await until(lambda: informer.problem)
            await until(lambda: informer.problem is None)

    asyncio.run(story())


def test_an_informer_asks_nothing_while_nothing_changes(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api, following(api) as informer:
            await until(lambda: kube.requests["watch", "configmaps"] == 1)
            before = kube.requests.copy()
            for n in range(50):
                kube.create(config_map(f"m{n}"))
            await until(lambda: len(informer.all()) == 50)
            assert kube.requests.since(before).total == 0

    asyncio.run(story())


def test_what_a_write_answered_is_known_at_once_and_never_outlives_a_deletion(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api, following(api) as informer:
            made = await api.create(MAPS, config_map("a"))
            informer.learn(made)
            assert informer.get("default", "a")
            await api.delete(f"{MAPS}/a")
            await until(lambda: informer.get("default", "a") is None)
            informer.learn(made)
            assert informer.get("default", "a") is None

    asyncio.run(story())


def test_a_kubeconfig_names_the_cluster(kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    path = kube.kubeconfig(tmp_path / "config", namespace="u-ada")

    async def story() -> None:
        async with KubeApi.connect(str(path)) as api:
            assert api.namespace == "u-ada"
            nodes, _ = await api.list("/api/v1/nodes")
            assert [node["metadata"]["name"] for node in nodes] == ["node-0"]

    asyncio.run(story())
    with pytest.raises(ConfigurationError, match="no cluster to talk to"):
        KubeApi.connect(str(tmp_path / "nothing"))


def test_a_token_that_was_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_cluster(tmp_path) is None
    (tmp_path / "token").write_text("one\n")
    monkeypatch.setattr("basilica.kube.client.access.TOKEN_READ_EVERY_S", 0.0)
    token = TokenFile(tmp_path / "token")
    assert token() == "one"
    (tmp_path / "token").write_text("two\n")
    assert token() == "two"
