"""DiLoCo through an object store: replicas that cannot reach each other train one model together.

    from basilica.diloco import DiLoCo, ObjectStoreAllReduce

    allreduce = ObjectStoreAllReduce("s3://bucket/run-7", rank, world_size)
    diloco = DiLoCo(model, optimizer, allreduce, sync_every=100)
    ...                                      # the ordinary loop, and in it after each optimizer.step():
    diloco.step(samples=len(batch))

Names are loaded when they are first used: nothing here needs torch but `DiLoCo`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basilica.diloco.allreduce import ObjectStoreAllReduce, RoundStats
    from basilica.diloco.errors import BarrierTimeout, CorruptPart, RoundConflict, RoundError, RoundGone
    from basilica.diloco.replica_entrypoint import on_sigterm
    from basilica.diloco.torch import DiLoCo
    from basilica.diloco.trainer import ArrayDiLoCo

_HOME_OF = {
    "ArrayDiLoCo": "trainer",
    "BarrierTimeout": "errors",
    "CorruptPart": "errors",
    "DiLoCo": "torch",
    "ObjectStoreAllReduce": "allreduce",
    "RoundConflict": "errors",
    "RoundError": "errors",
    "RoundGone": "errors",
    "RoundStats": "allreduce",
    "on_sigterm": "replica_entrypoint",
}

__all__ = [
    "ArrayDiLoCo",
    "BarrierTimeout",
    "CorruptPart",
    "DiLoCo",
    "ObjectStoreAllReduce",
    "RoundConflict",
    "RoundError",
    "RoundGone",
    "RoundStats",
    "on_sigterm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'basilica.diloco' has no attribute {name!r}")
    value = getattr(import_module(f"basilica.diloco.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
