"""A small, honest Kubernetes for tests: an API server over HTTP, a Job controller, a kubelet that runs commands here.

    with KubeServer() as kube:
        client = kubernetes.client.BatchV1Api(kube.api_client())

The README of this distribution says what it does and what it does not.
"""

from basilica_testkube.kubelet import IGNORES_SIGTERM, MESSAGE_FILE
from basilica_testkube.nodes import NodeSpec
from basilica_testkube.podworker import PULL_FAILS
from basilica_testkube.server import KubeServer
from basilica_testkube.timing import MEASURED, Timing
from basilica_testkube.traffic import Requests

__all__ = ["IGNORES_SIGTERM", "MEASURED", "MESSAGE_FILE", "PULL_FAILS", "KubeServer", "NodeSpec", "Requests", "Timing"]
