"""The store on custom resources keeps the contract, against an API server that speaks HTTP."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from basilica.kube.api import KubeApi
from basilica.kube.crd import definition
from basilica.ports import Keys, Store
from basilica.stores.kubernetes import KubernetesKeys, KubernetesStore
from basilica.testing.kube import KubeServer
from basilica.testing.store_contract import KeysContract, StoreContract


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


class TestKubernetesKeys(KeysContract):
    kube: KubeServer

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Keys]:
        async with KubeApi(self.kube.url) as api:
            keys = KubernetesKeys(api, "default")
            await keys.open()
            yield keys
            await keys.close()
