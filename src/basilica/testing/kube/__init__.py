"""A small, honest Kubernetes for tests: an API server over HTTP, a Job controller, a kubelet that runs commands here.

    with KubeServer() as kube:
        client = kubernetes.client.BatchV1Api(kube.api_client())

See docs/how-to/test-with-kube.md for what it does and what it does not.
"""

from basilica.testing.kube.kubelet import IGNORES_SIGTERM, MESSAGE_FILE
from basilica.testing.kube.nodes import NodeSpec
from basilica.testing.kube.podworker import PULL_FAILS
from basilica.testing.kube.server import KubeServer
from basilica.testing.kube.timing import MEASURED, Timing
from basilica.testing.kube.traffic import Requests

__all__ = ["IGNORES_SIGTERM", "MEASURED", "MESSAGE_FILE", "PULL_FAILS", "KubeServer", "NodeSpec", "Requests", "Timing"]
