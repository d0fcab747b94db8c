"""The rules that every store shares."""

from dataclasses import replace

from basilica.core import accounts
from basilica.core.damage import DamagedRun
from basilica.core.errors import QuotaExceeded, ValidationError
from basilica.core.names import check_name
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from basilica.ports import Deployment, Limits, UsageRow

EVENTS_KEPT = 1000
"""Distinct events per run; beyond it the oldest go, except `Created`."""

IDEMPOTENCY_SECONDS = 86400.0
"""How long a create can be repeated with the same key."""


def is_live(status: DeploymentStatus) -> bool:
    """Whether the run holds its name and counts against its user's limits."""
    return not status.phase.terminal


def is_open(spec: DeploymentSpec, status: DeploymentStatus) -> bool:
    """Whether the controller still has work for the run."""
    return not status.settled or spec.wanted is Wanted.DELETE


def usage_of(deployment: Deployment) -> UsageRow:
    status = deployment.status
    spent = accounts.spent_and_closed(status)
    return UsageRow(
        user=deployment.user,
        instance=deployment.instance,
        name=deployment.spec.name,
        rank_seconds=status.usage.rank_seconds,
        gpu_seconds=status.usage.gpu_seconds,
        created_at=status.created_at,
        ended_at=status.terminal_at,
        training_seconds=spent.training_seconds,
        lost_seconds=spent.lost_seconds,
    )


def check_limits(limits: Limits, *, deployments: int, ranks: int, new_deployments: int, new_ranks: int) -> None:
    """Refuse a request that would exceed a limit. A user who exceeds a lowered limit already may keep the same, or
    less.
    """
    for what, limit, current, requested in (
        ("deployments", limits.deployments, deployments, new_deployments),
        ("ranks", limits.ranks, ranks, new_ranks),
    ):
        if limit is not None and requested > 0 and current + requested > limit:
            raise QuotaExceeded(what, limit, current, requested)


def ending_stand_in(
    run: DamagedRun, wanted: Wanted, spec: DeploymentSpec | None, status: DeploymentStatus | None
) -> Deployment:
    """Return a readable run in place of a damaged one, made to end: its readable parts, and the least for the rest.

    A status without ranks makes the controller stop every rank that it sees of the run.
    """
    size = max(1, run.target)
    least = DeploymentSpec(name=_usable_name(run), program=Exec(("true",)), world=WorldSize(1, size, size))
    kept = (least if spec is None else spec).ended_by(wanted)
    fresh = DeploymentStatus(created_at=run.created_at) if status is None else status
    if fresh.observed_generation >= kept.generation and not fresh.phase.terminal:
        kept = replace(kept, generation=fresh.observed_generation + 1)
    return Deployment(
        instance=run.instance,
        user=run.user,
        namespace=run.namespace,
        spec=kept,
        status=fresh,
        version=run.version,
    )


def _usable_name(run: DamagedRun) -> str:
    try:
        return check_name(run.name)
    except ValidationError:
        return "damaged"
