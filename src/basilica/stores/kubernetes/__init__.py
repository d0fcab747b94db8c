"""The store on a Kubernetes cluster: runs are custom resources, API keys are Secrets."""

from basilica.stores.kubernetes.keys import KubernetesKeys
from basilica.stores.kubernetes.refusals import Refusals
from basilica.stores.kubernetes.store import KubernetesStore

__all__ = ["KubernetesKeys", "KubernetesStore", "Refusals"]
