"""The store on custom resources keeps the contract, against an API server that speaks HTTP."""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from basilica.core.damage import DamagedRun
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.crd import definition
from basilica.ports import Keys, Store
from basilica.stores.kubernetes import KubernetesKeys, KubernetesStore
from basilica.testing.store_contract import KeysContract, StoreContract
from basilica.testing.store_contract.damage import Part
from basilica_testkube import KubeServer


@pytest.fixture(autouse=True)
def kube(request: pytest.FixtureRequest) -> Iterator[KubeServer]:
    with KubeServer(processes=False) as server:
        server.create(definition())
        request.instance.kube = server
        yield server


class TestKubernetesStore(StoreContract):
    kube: KubeServer

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Store]:
        async with KubeApi(self.kube.url) as api:
            store = KubernetesStore(api)
            await store.open()
            yield store
            await store.close()

    async def damage(self, store: Store, instance: str, part: Part) -> None:
        """In the cluster's own storage, in ways that the schema lets pass."""
        before = await store.get(instance)
        obj = copy.deepcopy(self.kube.get("userdeployments", instance, before.namespace))
        assert obj is not None
        if part == "spec":
            obj["spec"]["env"] = {"not a name": ""}
        else:
            obj["status"]["state"] = "zlib:damaged"
        kind, storage = self.kube._kind("userdeployments", None), self.kube._registry.store
        await asyncio.to_thread(self.kube._do, lambda: storage.put(kind, obj))
        async with asyncio.timeout(10):
            async for _ in store.changes(before.version):
                if any(isinstance(found, DamagedRun) for found in await store.listed()):
                    return


class TestKubernetesKeys(KeysContract):
    kube: KubeServer

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Keys]:
        async with KubeApi(self.kube.url) as api:
            keys = KubernetesKeys(api, "default")
            await keys.open()
            yield keys
            await keys.close()
