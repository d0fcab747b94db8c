"""Elastic distributed training that tells you what is going on.

    import basilica

    @basilica.distributed(world_size=basilica.WorldSize(2, 2, 4))
    def train() -> float: ...

    training = train()          # starts two ranks and returns their handle
    training.scale(4)
    print(training.results())   # what each rank returned

Names are loaded when they are first used: importing this package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from basilica.version import __version__

if TYPE_CHECKING:
    from basilica.client.api import BasilicaClient
    from basilica.client.decorator import distributed
    from basilica.client.embedded import shutdown
    from basilica.client.options import DeployOptions
    from basilica.client.training import DistributedTraining
    from basilica.client.views import (
        BenchResult,
        BenchStatus,
        Checkpoint,
        CrashLoop,
        Culprit,
        Event,
        Goodput,
        Incident,
        Loss,
        PlannedChange,
        RankAgent,
        RankExit,
        RankReport,
        RankStatus,
        RunView,
        Series,
        SeriesPoint,
        Stalled,
    )
    from basilica.core.errors import (
        AuthenticationError,
        AuthorizationError,
        BadResult,
        BasilicaError,
        BelowMinimumWorld,
        Conflict,
        DeploymentNotFound,
        DistributedError,
        NameInUse,
        NetworkError,
        QuotaExceeded,
        RateLimitError,
        RendezvousUnavailable,
        ServerError,
        UDTerminalState,
        ValidationError,
        WorldClosed,
        WorldSizeOutOfBounds,
    )
    from basilica.core.seen import BenchPoint
    from basilica.core.spec import ProviderFilter
    from basilica.core.world import WorldSize, WorldStatus
    from basilica.mesh import mesh_status, mesh_wait, mesh_wait_async
    from basilica.progress.notices import Notice, notice
    from basilica.progress.progress import Progress
    from basilica.progress.samples import Samples
    from basilica.reports.writer import report

_HOMES = {
    "basilica.client.api": ("BasilicaClient",),
    "basilica.client.decorator": ("distributed",),
    "basilica.client.embedded": ("shutdown",),
    "basilica.client.options": ("DeployOptions",),
    "basilica.client.training": ("DistributedTraining",),
    "basilica.client.views": (
        "BenchResult",
        "BenchStatus",
        "Checkpoint",
        "CrashLoop",
        "Culprit",
        "Event",
        "Goodput",
        "Incident",
        "Loss",
        "PlannedChange",
        "RankAgent",
        "RankExit",
        "RankReport",
        "RankStatus",
        "RunView",
        "Series",
        "SeriesPoint",
        "Stalled",
    ),
    "basilica.core.errors": (
        "AuthenticationError",
        "AuthorizationError",
        "BadResult",
        "BasilicaError",
        "BelowMinimumWorld",
        "Conflict",
        "DeploymentNotFound",
        "DistributedError",
        "NameInUse",
        "NetworkError",
        "QuotaExceeded",
        "RateLimitError",
        "RendezvousUnavailable",
        "ServerError",
        "UDTerminalState",
        "ValidationError",
        "WorldClosed",
        "WorldSizeOutOfBounds",
    ),
    "basilica.core.seen": ("BenchPoint",),
    "basilica.core.spec": ("ProviderFilter",),
    "basilica.core.world": ("WorldSize", "WorldStatus"),
    "basilica.mesh": ("mesh_status", "mesh_wait", "mesh_wait_async"),
    "basilica.progress.notices": ("Notice", "notice"),
    "basilica.progress.progress": ("Progress",),
    "basilica.progress.samples": ("Samples",),
    "basilica.reports.writer": ("report",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AuthenticationError",
    "AuthorizationError",
    "BadResult",
    "BasilicaClient",
    "BasilicaError",
    "BelowMinimumWorld",
    "BenchPoint",
    "BenchResult",
    "BenchStatus",
    "Checkpoint",
    "Conflict",
    "CrashLoop",
    "Culprit",
    "DeployOptions",
    "DeploymentNotFound",
    "DistributedError",
    "DistributedTraining",
    "Event",
    "Goodput",
    "Incident",
    "Loss",
    "NameInUse",
    "NetworkError",
    "Notice",
    "PlannedChange",
    "Progress",
    "ProviderFilter",
    "QuotaExceeded",
    "RankAgent",
    "RankExit",
    "RankReport",
    "RankStatus",
    "RateLimitError",
    "RendezvousUnavailable",
    "RunView",
    "Samples",
    "Series",
    "SeriesPoint",
    "ServerError",
    "Stalled",
    "UDTerminalState",
    "ValidationError",
    "WorldClosed",
    "WorldSize",
    "WorldSizeOutOfBounds",
    "WorldStatus",
    "__version__",
    "distributed",
    "mesh_status",
    "mesh_wait",
    "mesh_wait_async",
    "notice",
    "report",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'basilica' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
