"""Directories that were sent to a cluster: whole or not there, and told of in words if something is wrong with them."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import httpx2
import pytest

from basilica.core.errors import RuntimeUnavailable, ValidationError
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.archives import index_name, part_name
from basilica.ports import StoredArchive
from basilica.runtimes.kubernetes import archives
from basilica.runtimes.kubernetes.archives import ClusterArchives
from basilica.testing.runtime_contract import packed
from basilica_testkube import KubeServer
from tests.kube_runtime.plane import NAMESPACE, SETTINGS, Plane, control_plane, sh

SMALL = packed({"hello": "from afar\n"})
LARGE = packed({f"file-{n}": Random(n).randbytes(400_000).hex() for n in range(6)})  # three parts
OLD = 1e12  # everything is


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 65536):
        yield content[at : at + 65536]


async def send(keeper: ClusterArchives, content: bytes) -> StoredArchive:
    return await keeper.store("ada", pieces(content))


async def nobody() -> set[tuple[str, str]]:
    return set()


def names(kube: KubeServer) -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in kube.objects("configmaps", NAMESPACE) if "archive" in str(obj))


# ---- keeping them ----------------------------------------------------------------------------------------------------


def test_what_was_half_written_is_not_there_and_is_written_whole_by_the_next(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api:
            keeper = ClusterArchives(api, 16 << 20)
            digest = (await send(keeper, SMALL)).digest  # so that the namespace is there
            large = (await send(keeper, LARGE)).digest
            await keeper.forget(nobody, OLD)
            assert names(kube) == []
            kube.fail("patch", "configmaps", status=403, times=1)  # the touch that finds nothing
            with pytest.raises(RuntimeUnavailable):
                await send(keeper, LARGE)
            assert names(kube) == []
            for broken in range(3):
                with pytest.raises(ZeroDivisionError):
                    await _send_until(keeper, LARGE, broken)
                assert len(names(kube)) == broken
                assert not await keeper.has("ada", large)
                assert await keeper.parts(NAMESPACE, large) == 0
            assert (await send(keeper, LARGE)).digest == large
            assert await keeper.parts(NAMESPACE, large) == 3
            assert names(kube) == [index_name(large), *(part_name(large, n) for n in range(3))]
            assert not await keeper.has("ada", digest)

    asyncio.run(story())


async def _send_until(keeper: ClusterArchives, content: bytes, parts: int) -> None:
    """As by an API server that is killed when it has written so many parts, one after the other."""
    apply, written = keeper._apply, 0
    one_at_a_time = asyncio.Lock()

    async def dying(namespace: str, body: dict[str, Any]) -> None:
        nonlocal written
        async with one_at_a_time:
            if written == parts:
                raise ZeroDivisionError
            written += 1
            await apply(namespace, body)

    keeper._apply = dying  # type: ignore[method-assign]
    try:
        await send(keeper, content)
    finally:
        keeper._apply = apply  # type: ignore[method-assign]


def test_a_part_that_somebody_deleted_is_written_again_by_the_next_upload(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api:
            keeper = ClusterArchives(api, 16 << 20)
            digest = (await send(keeper, LARGE)).digest
            before = kube.requests.copy()
            await send(keeper, LARGE)
            assert kube.requests.since(before).total == 2  # a touch, and a look at what is there
            await api.delete(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{part_name(digest, 1)}")
            await send(keeper, LARGE)
            assert len(names(kube)) == 4

    asyncio.run(story())


@pytest.mark.parametrize("moment", range(6))
def test_one_that_is_sent_while_it_is_forgotten_is_there_whole(kube: KubeServer, moment: int) -> None:
    """Whatever the one who forgets has done by then: nothing, the look, or some of the deletions."""

    async def story() -> None:
        async with KubeApi(kube.url) as api:
            keeper, other = ClusterArchives(api, 16 << 20), ClusterArchives(api, 16 << 20)
            digest = (await send(keeper, LARGE)).digest
            called, now = 0, time.time()

            async def interrupted(call: Any, *args: Any, **more: Any) -> Any:
                nonlocal called
                called += 1
                if called == moment:
                    assert (await send(other, LARGE)).digest == digest
                return await call(*args, **more)

            slow = _Slow(api, interrupted)
            await ClusterArchives(slow, 16 << 20).forget(nobody, now)  # type: ignore[arg-type]
            if called < moment or moment == 0:
                await send(other, LARGE)
            assert await keeper.has("ada", digest)
            assert await keeper.parts(NAMESPACE, digest) == 3
            assert len(names(kube)) == 4

    asyncio.run(story())


class _Slow:
    """An API in which something happens before a list or a deletion."""

    def __init__(self, api: KubeApi, before: Any) -> None:
        self._api, self._before = api, before

    async def list(self, *args: Any, **more: Any) -> Any:
        return await self._before(self._api.list, *args, **more)

    async def delete(self, *args: Any, **more: Any) -> Any:
        return await self._before(self._api.delete, *args, **more)


def test_what_is_too_large_is_refused_with_what_to_do(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api:
            keeper = ClusterArchives(api, 1 << 20)
            with pytest.raises(
                ValidationError, match=r"1\.0 MiB that Kubernetes can carry: .*\.gitignore.*image.*bucket"
            ):
                await send(keeper, LARGE)
            assert names(kube) == []
            monkeypatch.setattr(archives, "USER_ARCHIVES", 3)
            keeper = ClusterArchives(api, len(LARGE))
            sent = [packed({"noise": Random(n).randbytes(len(LARGE) // 2).hex()}) for n in range(6)]
            for content in sent[:-1]:
                await send(keeper, content)
            with pytest.raises(ValidationError, match="delete runs that you do not need"):
                await send(keeper, sent[-1])
            await keeper.forget(nobody, OLD)
            await send(keeper, sent[-1])

    asyncio.run(story())


def test_nothing_old_costs_one_request_and_what_never_became_whole_is_forgotten_too(kube: KubeServer) -> None:
    async def story() -> None:
        async with KubeApi(kube.url) as api:
            keeper = ClusterArchives(api, 16 << 20)
            await send(keeper, SMALL)
            with pytest.raises(ZeroDivisionError):
                await _send_until(keeper, LARGE, 2)
            before = kube.requests.copy()
            assert await keeper.forget(nobody, time.time() - 3600) == []
            assert kube.requests.since(before).total == 1
            assert len(await keeper.forget(nobody, OLD)) == 2
            assert names(kube) == []

    asyncio.run(story())


# ---- running in them -------------------------------------------------------------------------------------------------


async def told(plane: Plane, run: str) -> str:
    done = await plane.settled(run)
    assert done.status.phase == "failed"
    return f"{done.status.message} {done.status.exits}"


def test_an_archive_that_is_not_there_or_not_whole_is_a_start_error_in_words(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            digest = (await plane.runtime.store_archive("ada", pieces(LARGE))).digest
            missing = await plane.deploy(sh("echo never"), archive="ab" * 32)
            assert "the archive abababababab is not on the cluster" in await told(plane, missing)
            await plane.api.delete(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{part_name(digest, 2)}")
            halved = await plane.deploy(sh("echo never"), archive=digest, max_restarts=3)
            assert f"part 3 of 3 of the archive {digest[:12]} is missing: deploy the run again" in await told(
                plane, halved
            )
            astray = await plane.runtime.store_archive("ada", pieces(SMALL))
            lost = await plane.deploy(sh("echo never"), archive=astray.digest, workdir="no/such")
            assert "there is no directory no/such in what was sent" in await told(plane, lost)
            for run in (missing, halved, lost):
                [pod] = plane.pods(run)
                assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
                assert "never" not in " ".join(await plane.log(run, 0)).split()

    asyncio.run(story())


def test_what_is_not_what_was_sent_is_not_unpacked(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            digest = (await plane.runtime.store_archive("ada", pieces(SMALL))).digest
            path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{part_name(digest, 0)}"
            forged = await plane.api.get(path)
            await plane.api.delete(path)
            forged["binaryData"]["part"] = base64.b64encode(packed({"hello": "from elsewhere"})).decode()
            forged["metadata"] = {"name": part_name(digest, 0), "labels": forged["metadata"]["labels"]}
            await plane.api.create(path.rpartition("/")[0], forged)
            run = await plane.deploy(sh("cat hello"), archive=digest)
            problem = await told(plane, run)
            assert f"what came is not the archive {digest[:12]} but" in problem
            assert "delete them, and deploy the run again" in problem

    asyncio.run(story())


def test_a_rank_that_gets_another_pod_gets_the_directory_as_it_was_sent(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            digest = (await plane.runtime.store_archive("ada", pieces(SMALL))).digest
            script = sh("ls; touch mark; echo marked; exec sleep 1000")
            run = await plane.deploy(script, archive=digest, max_restarts=3)
            await plane.until_ready(run, 1)
            await plane.happens(lambda: "marked" in kube_log(plane, run))
            [pod] = plane.pods(run)
            first = pod["metadata"]["name"]
            kube.oom_kill(first, namespace=NAMESPACE)
            await plane.happens(lambda: "marked" in kube_log(plane, run, other_than=first))
            assert kube_log(plane, run, other_than=first) == ["hello", "marked"]
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def kube_log(plane: Plane, run: str, *, other_than: str = "") -> list[str]:
    for name in (pod["metadata"]["name"] for pod in plane.pods(run)):
        if name != other_than:
            return httpx2.get(f"{plane.kube.url}/api/v1/namespaces/{NAMESPACE}/pods/{name}/log").text.splitlines()
    return []


def test_a_run_with_an_archive_costs_one_request_more_however_many_ranks_it_has() -> None:
    async def cost(plane: Plane, ranks: int, archive: str | None) -> int:
        before = plane.kube.requests.copy()
        run = await plane.deploy(
            sh("true"), (ranks, ranks, 64), archive=archive, name=f"r{ranks}-{archive is None}".lower()
        )
        await plane.happens(lambda: len(plane.pods(run)) == ranks)
        asked = plane.kube.requests.since(before)
        assert asked["create", "pods"] == ranks
        return asked.total - ranks

    async def story() -> None:
        with KubeServer(processes=False) as kube:
            async with control_plane(kube) as plane:
                await plane.happens(lambda: kube.requests.by_verb("watch") == 3)
                digest = (await plane.runtime.store_archive("ada", pieces(LARGE))).digest
                without = await cost(plane, 2, None)
                assert await cost(plane, 2, digest) == await cost(plane, 40, digest) == without + 1

    asyncio.run(story())


def test_the_limit_is_a_setting(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube, settings=replace(SETTINGS, archive_bytes=1000)) as plane:
            await plane.runtime.store_archive("ada", pieces(SMALL))
            with pytest.raises(ValidationError, match="larger, packed"):
                await plane.runtime.store_archive("ada", pieces(LARGE))

    asyncio.run(story())
