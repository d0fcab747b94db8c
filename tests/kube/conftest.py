"""Each test has a cluster of its own."""

from collections.abc import Iterator

import pytest
from kubernetes import client

from basilica.testing.kube import KubeServer


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    """A cluster whose pods run nothing: the test ends them."""
    with KubeServer(processes=False) as server:
        yield server


@pytest.fixture
def machines() -> Iterator[KubeServer]:
    """A cluster whose pods are processes."""
    with KubeServer() as server:
        yield server


@pytest.fixture
def core(kube: KubeServer) -> Iterator[client.CoreV1Api]:
    with kube.api_client() as api:
        yield client.CoreV1Api(api)


@pytest.fixture
def batch(kube: KubeServer) -> Iterator[client.BatchV1Api]:
    with kube.api_client() as api:
        yield client.BatchV1Api(api)
