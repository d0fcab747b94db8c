"""The Kubernetes runtime keeps the contract, on a test cluster whose pods are processes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from basilica.kube.client.api import KubeApi
from basilica.ports import Runtime
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica.testing import RuntimeContract
from basilica_testkube import KubeServer
from tests.kube_runtime.plane import SETTINGS


class TestKubernetesRuntime(RuntimeContract):
    kube: KubeServer

    @pytest.fixture(autouse=True)
    def cluster(self) -> Iterator[None]:
        with KubeServer() as self.kube:
            self.kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
            yield

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Runtime]:
        yield KubernetesRuntime(KubeApi(self.kube.url), SETTINGS)
