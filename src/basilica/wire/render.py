"""The rendering of runs: from the core's values to the models of the wire."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from basilica.core import metering, policy
from basilica.core.damage import DAMAGED, DamagedRun
from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentDamaged
from basilica.core.events import RecordedEvent
from basilica.core.phase import Phase, RankPhase
from basilica.core.reports import Report, Series
from basilica.core.seen import BenchResult, Stalled
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import BenchStatus, DeploymentStatus
from basilica.core.why import Absence, why
from basilica.core.world import RankExit, RankStatus, WorldSize
from basilica.wire import responses as out
from basilica.wire.base import Outgoing, rfc3339, rfc3339_or_none
from basilica.wire.views import is_moment

Model = TypeVar("Model", bound=Outgoing)
ETCD_PORT = 2379
NOTHING: Mapping[int, Report] = {}

_RANK_PHASES = {
    RankPhase.WAITING: "Pending",
    RankPhase.LAUNCHED: "Pending",
    RankPhase.RUNNING: "Running",
    RankPhase.STOPPING: "Running",
    RankPhase.SUCCEEDED: "Succeeded",
    RankPhase.LOST: "Failed",
    RankPhase.DROPPED: "Failed",
}
_STATES = {
    Phase.PENDING: "Pending",
    Phase.SCHEDULING: "Pending",
    Phase.PULLING: "Provisioning",
    Phase.STARTING: "Provisioning",
    Phase.READY: "Active",
    Phase.DEGRADED: "Active",
    Phase.SUCCEEDED: "Succeeded",
    Phase.FAILED: "Failed",
    Phase.CANCELLED: "Cancelled",
}
_BENCH_OUTCOMES = {"Succeeded": "success", "Failed": "error", "TimedOut": "timeout", "Skipped": "skipped"}


def state_of(spec: DeploymentSpec, status: DeploymentStatus) -> str:
    """Return the older, coarser state beside `phase`."""
    return "Terminating" if spec.wanted is Wanted.DELETE else _STATES[status.phase]


def render_world(spec: DeploymentSpec, status: DeploymentStatus) -> out.World:
    world = status.world(spec.world)
    return out.World(
        ready=world.ready, target=world.target, min=world.min, max=world.max, below_minimum=world.below_minimum
    )


def shown_ranks(spec: DeploymentSpec, status: DeploymentStatus) -> list[RankStatus]:
    """Return the ranks of the wanted world, and those above it that still run."""
    size = max(status.world_target, 0 if status.phase.terminal else spec.world.target)
    return [r for r in status.ranks if r.rank < size or r.phase.may_run]


def render_rank(rank: RankStatus, instance: str, report: Report | None = None) -> out.Rank:
    return out.Rank(
        rank=rank.rank,
        pod_name=rank.pod_name or f"{instance}-{rank.rank}",
        phase=_RANK_PHASES[rank.phase],
        restarts=rank.restarts,
        node_name=rank.node or None,
        provider=rank.provider,
        region=rank.region,
        attempt=rank.attempt,
        state=rank.phase.value,
        started_at=rfc3339_or_none(rank.started_at),
        note=rank.note or None,
        report=None if report is None else render_report(report),
        stalled=None if rank.stalled is None else render_stall(rank.stalled),
    )


def render_report(report: Report) -> out.RankReport:
    return out.RankReport(
        at=rfc3339(report.at),
        step=report.step,
        step_seconds=report.step_seconds,
        values={name: _number(value) for name, value in report.values.items()},
    )


def render_stall(stalled: Stalled) -> out.RankStall:
    return filled(out.RankStall, stalled)


def render_series(series: Series) -> out.SeriesView:
    points = [
        out.SeriesPointView(
            step=p.step,
            at=rfc3339(p.at),
            value=_number(p.mean),
            min=_number(p.min),
            max=_number(p.max),
            count=p.count,
        )
        for p in series.points
    ]
    return out.SeriesView(rank=series.rank, worker=series.worker, metric=series.metric, points=points)


def _number(value: float) -> float | str:
    """Return a number, or a text for one that is not finite: JSON has none, and an omitted NaN would hide a failure."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def render_exits(status: DeploymentStatus, culprit: policy.Culprit | None) -> list[out.Exit]:
    """Return one entry per rank, its last; empty while the run is not over."""
    if not status.phase.terminal:
        return []
    return [_render_exit(exit, culprit) for exit in policy.last_exits(status.exits)]


def _render_exit(exit: RankExit, culprit: policy.Culprit | None) -> out.Exit:
    return filled(out.Exit, exit, exit_code=_exit_code(exit), role=policy.role_of(exit, culprit))


def _exit_code(exit: RankExit) -> int:
    return policy.UNKNOWN_EXIT_CODE if exit.exit_code is None else exit.exit_code


def render_culprit(culprit: policy.Culprit) -> out.CulpritView:
    facts = {"evidence": culprit.evidence, "confidence": culprit.confidence}
    return filled(out.CulpritView, culprit.exit, exit_code=_exit_code(culprit.exit), **facts)


def culprit_of(status: DeploymentStatus) -> policy.Culprit | None:
    if status.phase is not Phase.FAILED:
        return None
    return policy.find_culprit(status.failures, status.whole_at)


def render_bench(bench: BenchStatus) -> out.BenchView:
    return filled(
        out.BenchView,
        bench,
        mode="on-start",
        last_attempt_at=rfc3339_or_none(bench.completed_at),
        last_attempt_outcome=_BENCH_OUTCOMES.get(bench.phase.value),
        on_worker_nodes=None if bench.on_worker_nodes else False,
        result=None if bench.result is None else _render_bench_result(bench.result),
    )


def _render_bench_result(result: BenchResult) -> out.BenchResultView:
    return filled(out.BenchResultView, result, sweep=[filled(out.BenchPointView, point) for point in result.sweep])


def filled(model: type[Model], facts: object, **given: object) -> Model:
    """Fill an answer from facts of the same names, apart from those given. An empty optional text is omitted."""
    told = dict(given)
    for name, field in model.model_fields.items():
        if name not in given:
            value = _told(name, getattr(facts, name))
            told[name] = None if value == "" and not field.is_required() else value
    return model.model_validate(told)


def _told(name: str, value: Any) -> Any:
    if is_moment(name) and value is not None:
        return rfc3339(value)
    match value:
        case StrEnum():
            return value.value
        case tuple():
            return list(value)
        case _:
            return value


def render_usage(status: DeploymentStatus, now: float | None) -> out.UsageView:
    """Return the usage up to `now`, or with None up to the last change of the status; `until` has that time."""
    usage = metering.total(status, now)
    return out.UsageView(
        rank_seconds=usage.rank_seconds,
        gpu_seconds=usage.gpu_seconds,
        gpus=sum(rank.gpus for rank in status.ranks if rank.metered_until is not None),
        until=rfc3339_or_none(metering.counted_until(status, now)),
    )


def render_distributed(
    instance: str,
    spec: DeploymentSpec,
    status: DeploymentStatus,
    now: float,
    reports: Mapping[int, Report] = NOTHING,
    *,
    unattended: Absence | None = None,
) -> out.Distributed:
    culprit = culprit_of(status)
    resize = status.last_resize
    return out.Distributed(
        world_size=render_world(spec, status),
        transport="direct-mesh" if status.mesh is None else status.mesh.transport,
        ranks=[render_rank(r, instance, reports.get(r.rank)) for r in shown_ranks(spec, status)],
        conditions=[
            out.ConditionView(
                type=c.type, status=c.status, reason=c.reason, message=c.message, last_transition_time=rfc3339(c.since)
            )
            for c in status.conditions
        ],
        rendezvous=_render_rendezvous(spec, status),
        world_size_history=[
            out.WorldSampleView(timestamp=rfc3339(s.at), target=s.target, ready=s.ready) for s in status.history
        ],
        last_resize=None
        if resize is None
        else out.ResizeView(
            from_target=resize.from_target,
            to_target=resize.to_target,
            timestamp=rfc3339(resize.at),
            reason=resize.reason,
        ),
        milestones=[out.MilestoneView(name=m.name, timestamp=rfc3339(m.at)) for m in status.milestones],
        bench=None if status.bench is None else render_bench(status.bench),
        rank_exits=render_exits(status, culprit),
        generation=spec.generation,
        observed_generation=status.observed_generation,
        settled=status.settled,
        blocked_on=why(spec, status, now, unattended),
        culprit=None if culprit is None else render_culprit(culprit),
        usage=render_usage(status, None if unattended is not None else now),
    )


def _render_rendezvous(spec: DeploymentSpec, status: DeploymentStatus) -> out.RendezvousView:
    endpoint = status.rendezvous_endpoint
    port = int(endpoint.rpartition(":")[2]) if endpoint else spec.rendezvous_port or ETCD_PORT
    return out.RendezvousView(backend=spec.rendezvous_backend, port=port, endpoint=endpoint)


def render_event(event: RecordedEvent) -> out.EventView:
    return out.EventView(
        type=event.kind,
        reason=event.reason,
        message=event.message,
        count=event.count,
        first_timestamp=rfc3339(event.first_at),
        last_timestamp=rfc3339(event.last_at),
    )


def render_deployment(
    deployment: Deployment, now: float, reports: Mapping[int, Report] = NOTHING, unattended: Absence | None = None
) -> out.DeploymentResponse:
    """Return a run. `unattended`: why its status may be out of date, if that is a cause for concern."""
    instance, spec, status = deployment.instance, deployment.spec, deployment.status
    distributed = render_distributed(instance, spec, status, now, reports, unattended=unattended)
    return out.DeploymentResponse(
        instance_name=instance,
        friendly_name=spec.name,
        user_id=deployment.user,
        namespace=deployment.namespace,
        image=spec.image,
        state=state_of(spec, status),
        phase=status.phase.value,
        message=status.message or None,
        replicas=out.Replicas(desired=spec.world.target, ready=distributed.world_size.ready),
        pods=[out.Pod(name=r.pod_name, status=r.phase, node=r.node_name) for r in distributed.ranks],
        created_at=rfc3339(status.created_at),
        version=deployment.version,
        distributed=distributed,
    )


def render_summary(deployment: Deployment) -> out.DeploymentSummary:
    spec, status = deployment.spec, deployment.status
    world = render_world(spec, status)
    return out.DeploymentSummary(
        instance_name=deployment.instance,
        friendly_name=spec.name,
        state=state_of(spec, status),
        phase=status.phase.value,
        replicas=out.Replicas(desired=spec.world.target, ready=world.ready),
        created_at=rfc3339(status.created_at),
        version=deployment.version,
        world_size=world,
        message=status.message or None,
        finished_at=rfc3339_or_none(status.terminal_at),
    )


def render_listed(run: Deployment | DamagedRun) -> out.DeploymentSummary:
    """Return a run for the list, with a readable record or not."""
    return render_damaged(run) if isinstance(run, DamagedRun) else render_summary(run)


def render_damaged_deployment(run: DamagedRun) -> out.DeploymentResponse:
    """Return a run whose record cannot be read, in the shape of all others: a client that requests each run of its
    list must not lose them all for one."""
    row = render_damaged(run)
    spec = DeploymentSpec(name=run.name, program=Exec(("unknown",)), world=WorldSize(1, run.target, run.target))
    status = DeploymentStatus(created_at=run.created_at)
    distributed = render_distributed(run.instance, spec, status, run.created_at)
    return out.DeploymentResponse(
        instance_name=run.instance,
        friendly_name=run.name,
        user_id=run.user,
        namespace=run.namespace,
        image="",
        state=row.state,
        phase=row.phase,
        message=row.message,
        replicas=row.replicas,
        pods=[],
        created_at=row.created_at,
        version=run.version,
        distributed=distributed.model_copy(update={"world_size": row.world_size, "blocked_on": row.message or ""}),
    )


def render_damaged(run: DamagedRun) -> out.DeploymentSummary:
    """Return the row of a damaged run, whose world is known by its size alone; `message` has fault and remedy."""
    return out.DeploymentSummary(
        instance_name=run.instance,
        friendly_name=run.name,
        state=DAMAGED.title(),
        phase=DAMAGED,
        replicas=out.Replicas(desired=run.target, ready=0),
        created_at=rfc3339(run.created_at),
        version=run.version,
        world_size=out.World(ready=0, target=run.target, min=1, max=run.target, below_minimum=True),
        message=str(DeploymentDamaged(run)),
        finished_at=None,
    )
