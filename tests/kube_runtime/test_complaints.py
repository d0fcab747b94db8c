"""Pods that Kubernetes refuses to make: who asks why is told what it has against them."""

import asyncio
from collections.abc import Iterator

import pytest

from basilica.core.why import why
from basilica_testkube import KubeServer
from tests.kube_runtime.plane import NAMESPACE, control_plane, sh


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def test_a_quota_that_is_too_small_is_named_until_there_is_room(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
            path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
            await plane.api.create(path, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})
            run = await plane.deploy(sh("sleep 1000"), (1, 3, 3))  # and a pod for its rendezvous

            async def told() -> str:
                found = await plane.store.get(run)
                return why(found.spec, found.status, 0.0)

            async with asyncio.timeout(60):
                while "exceeded quota: small" not in await told():
                    await asyncio.sleep(0.05)
            assert "a pod, which Kubernetes refuses" in await told()
            await plane.api.delete(f"{path}/small")
            await plane.until_ready(run, 3)
            assert "quota" not in await told()

    asyncio.run(story())
