"""The exceptions of the SDK under the module name that the published client gives them; `basilica.core.errors` has the
tree."""

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

__all__ = [
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
]
