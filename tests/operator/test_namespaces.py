"""Namespaces that are deleted with runs in them: nothing of ours keeps them, and no finalizer stays."""

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from basilica_testkube import KubeServer
from tests.operator.cluster import by_hand
from tests.operator.whole import Installation

pytestmark = pytest.mark.timeout(240)

PATIENCE = 60.0
PROMPT_S = 25.0  # an entrypoint tries for ten seconds to tell of its end a rendezvous that goes at the same time
SLEEPS = ["sh", "-c", 'trap "exit 0" TERM; sleep 1000 & wait']


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("installation"))
    yield installation
    installation.close()


def begin(kube: KubeServer, namespace: str, name: str, command: list[str], phase: str) -> None:
    kube.create(by_hand(name, namespace=namespace, image="", command=command), namespace)

    def is_there() -> bool:
        found = kube.get("userdeployments", name, namespace)
        return found is not None and (found.get("status") or {}).get("phase") == phase

    kube.wait_for(is_there, PATIENCE)


def namespace_of(kube: KubeServer, name: str) -> str:
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, "")
    return name


def left_in(kube: KubeServer, namespace: str) -> list[tuple[str, Any]]:
    kinds = ("pods", "jobs", "services", "deployments", "secrets", "userdeployments")
    found = [(kind, obj["metadata"]) for kind in kinds for obj in kube.objects(kind, namespace)]
    return [(f"{kind} {metadata['name']}", metadata.get("finalizers")) for kind, metadata in found]


def test_a_namespace_goes_with_the_live_run_in_it(here: Installation) -> None:
    kube, namespace = here.kube, namespace_of(here.kube, "u-goes")
    begin(kube, namespace, "live", SLEEPS, "ready")
    began = time.monotonic()
    assert httpx2.delete(f"{kube.url}/api/v1/namespaces/{namespace}").status_code == 200
    while kube.get("namespaces", namespace) is not None:
        assert time.monotonic() < began + PROMPT_S, left_in(kube, namespace)
        time.sleep(0.05)


def test_a_namespace_goes_with_a_run_in_it_that_has_ended(here: Installation) -> None:
    kube, namespace = here.kube, namespace_of(here.kube, "u-ended")
    begin(kube, namespace, "done", ["true"], "succeeded")
    kube.wait_for(lambda: "-rendezvous" not in str(kube.objects("services", namespace)), PATIENCE)
    began = time.monotonic()
    assert httpx2.delete(f"{kube.url}/api/v1/namespaces/{namespace}").status_code == 200
    while kube.get("namespaces", namespace) is not None:
        assert time.monotonic() < began + PROMPT_S, left_in(kube, namespace)
        time.sleep(0.05)


def test_a_run_whose_namespace_goes_can_be_deleted_meanwhile(here: Installation) -> None:
    kube, namespace = here.kube, namespace_of(here.kube, "u-both")
    begin(kube, namespace, "live", SLEEPS, "ready")
    began = time.monotonic()
    assert httpx2.delete(f"{kube.url}/api/v1/namespaces/{namespace}").status_code == 200
    path = f"/apis/basilica.dev/v1alpha1/namespaces/{namespace}/userdeployments/live"
    assert httpx2.delete(f"{kube.url}{path}").status_code == 200
    while kube.get("namespaces", namespace) is not None:
        assert time.monotonic() < began + PROMPT_S, left_in(kube, namespace)
        time.sleep(0.05)
