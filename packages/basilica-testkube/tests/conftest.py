"""Each test has a cluster of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

import exploring
from basilica_testkube import KubeServer

exploring.load_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole clusters, and processes: none of it in a quick run. Items of other directories come along."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


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
