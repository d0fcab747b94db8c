"""What every store agrees on, whatever it keeps its data in."""

from basilica.core.errors import QuotaExceeded
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.ports import Deployment, Limits, UsageRow

EVENTS_KEPT = 1000
"""Distinct events per run; beyond it the oldest go, except `Created`."""

IDEMPOTENCY_SECONDS = 86400.0
"""How long a create can be repeated with the same key."""


def is_live(status: DeploymentStatus) -> bool:
    """A live run holds its name and counts against its user's limits."""
    return not status.phase.terminal


def is_open(spec: DeploymentSpec, status: DeploymentStatus) -> bool:
    """The controller still has to do with it."""
    return not status.settled or spec.wanted is Wanted.DELETE


def usage_of(deployment: Deployment) -> UsageRow:
    status = deployment.status
    return UsageRow(
        user=deployment.user,
        instance=deployment.instance,
        name=deployment.spec.name,
        rank_seconds=status.usage.rank_seconds,
        gpu_seconds=status.usage.gpu_seconds,
        created_at=status.created_at,
        ended_at=status.terminal_at,
    )


def check_limits(limits: Limits, *, deployments: int, ranks: int, new_deployments: int, new_ranks: int) -> None:
    """Refuse what would lead over a limit. Who is over it already (it was lowered) may keep what there is, or less."""
    for what, limit, current, requested in (
        ("deployments", limits.deployments, deployments, new_deployments),
        ("ranks", limits.ranks, ranks, new_ranks),
    ):
        if limit is not None and requested > 0 and current + requested > limit:
            raise QuotaExceeded(what, limit, current, requested)
