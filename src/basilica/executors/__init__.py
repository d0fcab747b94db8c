"""N replicas somewhere, one protocol: on this machine, on Kubernetes, SageMaker, Modal, or a Basilica control plane.

    from basilica.executors import LocalProcessExecutor

    with LocalProcessExecutor() as executor:
        handles = executor.launch_replicas(4, "my_package.train:main", {"steps": 100})
        for result in executor.collect(handles):
            print(result["rank"], result["status"], result["result"])

Names are loaded when they are first used, and the packages of an executor when one is made.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basilica.executors.basilica import BasilicaExecutor
    from basilica.executors.eks.executor import EKSExecutor
    from basilica.executors.local.executor import LocalProcessExecutor
    from basilica.executors.modal import ModalSpawnExecutor
    from basilica.executors.progress import live_table
    from basilica.executors.protocol import ReplicaHandle, ReplicaResult, ServerlessExecutor, gather_logs
    from basilica.executors.sagemaker import SageMakerExecutor

_HOME_OF = {
    "BasilicaExecutor": "basilica",
    "EKSExecutor": "eks.executor",
    "LocalProcessExecutor": "local.executor",
    "ModalSpawnExecutor": "modal",
    "ReplicaHandle": "protocol",
    "ReplicaResult": "protocol",
    "SageMakerExecutor": "sagemaker",
    "ServerlessExecutor": "protocol",
    "gather_logs": "protocol",
    "live_table": "progress",
}

__all__ = [
    "BasilicaExecutor",
    "EKSExecutor",
    "LocalProcessExecutor",
    "ModalSpawnExecutor",
    "ReplicaHandle",
    "ReplicaResult",
    "SageMakerExecutor",
    "ServerlessExecutor",
    "gather_logs",
    "live_table",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'basilica.executors' has no attribute {name!r}")
    value = getattr(import_module(f"basilica.executors.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
