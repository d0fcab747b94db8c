"""The rendering of runs: from the core's values to the models of the wire."""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, get_args

from basilica.core import accounts, metering, policy
from basilica.core.checkpoints import Checkpoint
from basilica.core.damage import DAMAGED, DamagedRun
from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentDamaged
from basilica.core.events import RecordedEvent
from basilica.core.goodput import Goodput
from basilica.core.notice_rules import unready_ranks
from basilica.core.notices import Notice
from basilica.core.phase import Phase, RankPhase
from basilica.core.reports import Report, Series
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import BenchStatus, DeploymentStatus
from basilica.core.why import Absence, why
from basilica.core.world import RankAgent, RankExit, RankStatus, WorldSize
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
    return filled(out.World, status.world(spec.world))


def shown_ranks(spec: DeploymentSpec, status: DeploymentStatus) -> list[RankStatus]:
    """Return the ranks of the wanted world, and those above it that still run."""
    size = max(status.world_target, 0 if status.phase.terminal else spec.world.target)
    return [r for r in status.ranks if r.rank < size or r.phase.may_run]


def render_rank(rank: RankStatus, instance: str, report: Report | None = None) -> out.Rank:
    return filled(
        out.Rank,
        rank,
        pod_name=rank.pod_name or f"{instance}-{rank.rank}",
        phase=_RANK_PHASES[rank.phase],  # the published client's words; `state` has ours
        state=rank.phase.value,
        report=None if report is None else filled(out.RankReport, report),
        cause=None if rank.segment is None else rank.segment.cause.value,
        cause_since=None if rank.segment is None else rfc3339(rank.segment.since),
        agent=None if rank.agent is None else render_agent(rank.agent),
        step=None if rank.steps is None else rank.steps.reached,
    )


def render_agent(agent: RankAgent) -> out.RankAgentView:
    """Return a torchrun agent. It has torch ranks once its workers have been started."""
    torch_ranks = range(agent.first_torch_rank, agent.first_torch_rank + agent.nproc) if agent.round else ()
    return filled(out.RankAgentView, agent, torch_ranks=list(torch_ranks))


def render_series(series: Series) -> out.SeriesView:
    return filled(out.SeriesView, series)


def render_exits(status: DeploymentStatus, culprit: policy.Culprit | None) -> list[out.Exit]:
    """Return one entry per rank, its last; empty while the run is not over."""
    if not status.phase.terminal:
        return []
    return [render_exit(exit, culprit) for exit in policy.last_exits(status.exits)]


def render_exit(exit: RankExit, culprit: policy.Culprit | None) -> out.Exit:
    return filled(out.Exit, exit, exit_code=_exit_code(exit), role=policy.role_of(exit, culprit))


def render_worker_exits(status: DeploymentStatus, culprit: policy.Culprit | None) -> list[out.Exit]:
    """Return the latest failures of workers, in the order in which they were seen."""
    return [render_exit(exit, culprit) for exit in status.failures if exit.worker is not None]


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
    )


def filled(model: type[Model], facts: object, **given: object) -> Model:
    """Fill an answer and its parts from facts of the same names, apart from those given. An empty optional text is
    omitted."""
    values = dict(given)
    for name, required, part in _plan(model):
        if name not in given:
            value = _rendered(name, getattr(facts, name), part)
            values[name] = None if value == "" and not required else value
    return model.model_validate(values)


@cache
def _plan(model: type[Outgoing]) -> tuple[tuple[str, bool, type[Outgoing] | None], ...]:
    """Return each field's name, whether it is required, and the model of its parts."""
    return tuple((name, field.is_required(), _part(field.annotation)) for name, field in model.model_fields.items())


def _part(annotation: Any) -> type[Outgoing] | None:
    found = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return next((kind for kind in found if issubclass(kind, Outgoing)), None)


def _rendered(name: str, value: Any, part: type[Outgoing] | None) -> Any:
    if value is None:
        return None
    if is_moment(name):
        return rfc3339(value)
    match value:
        case StrEnum():
            return value.value
        case tuple():
            return list(value) if part is None else [filled(part, each) for each in value]
        case _:
            return value if part is None else filled(part, value)


def render_usage(status: DeploymentStatus, now: float | None) -> out.UsageView:
    """Return the usage up to `now`, or with None up to the last change of the status; `until` has that time."""
    usage = metering.total(status, now)
    return filled(
        out.UsageView,
        usage,
        gpus=sum(rank.gpus for rank in status.ranks if rank.metered_until is not None),
        until=rfc3339_or_none(metering.counted_until(status, now)),
    )


def render_goodput(spec: DeploymentSpec, status: DeploymentStatus, now: float | None) -> out.GoodputView:
    account: Goodput = accounts.goodput_of(spec, status, now)
    loss = account.largest_loss
    return filled(
        out.GoodputView,
        account,
        seconds={cause.value: seconds for cause, seconds in account.seconds.items()},
        largest_loss=None if loss is None else out.LossView(cause=loss[0].value, seconds=loss[1]),
    )


def render_incidents(spec: DeploymentSpec, status: DeploymentStatus, now: float | None) -> list[out.IncidentView]:
    """Return the incidents, the newest last."""
    rendered = []
    for incident in status.incidents:
        cost = accounts.cost_of(incident, spec, status, now)
        facts = {"cost_seconds": cost.seconds, "cost_gpu_seconds": cost.gpu_seconds}
        rendered.append(filled(out.IncidentView, incident, steps_recomputed=cost.steps_recomputed, **facts))
    return rendered


def render_notice(notice: Notice, status: DeploymentStatus) -> out.NoticeView:
    return filled(out.NoticeView, notice, waiting_for=[rank.rank for rank in unready_ranks(notice, status)])


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
    until = None if unattended is not None else now
    return filled(
        out.Distributed,
        status,
        world_size=render_world(spec, status),
        transport="direct-mesh" if status.mesh is None else status.mesh.transport,
        ranks=[render_rank(r, instance, reports.get(r.rank)) for r in shown_ranks(spec, status)],
        rendezvous=_render_rendezvous(spec, status),
        bench=None if status.bench is None else render_bench(status.bench),
        rank_exits=render_exits(status, culprit),
        generation=spec.generation,
        blocked_on=why(spec, status, now, unattended),
        culprit=None if culprit is None else render_culprit(culprit),
        usage=render_usage(status, until),
        goodput=render_goodput(spec, status, until),
        incidents=render_incidents(spec, status, until),
        notice=None if status.notice is None else render_notice(status.notice, status),
        worker_exits=render_worker_exits(status, culprit),
    )


def _render_rendezvous(spec: DeploymentSpec, status: DeploymentStatus) -> out.RendezvousView:
    endpoint = status.rendezvous_endpoint
    port = int(endpoint.rpartition(":")[2]) if endpoint else spec.rendezvous_port or ETCD_PORT
    return out.RendezvousView(backend=spec.rendezvous_backend, port=port, endpoint=endpoint)


def render_event(event: RecordedEvent) -> out.EventView:
    return filled(out.EventView, event)


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
        pods=[out.Pod(name=r.pod_name, status=r.phase, node=r.node) for r in distributed.ranks],
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


def render_checkpoint(found: Checkpoint) -> out.CheckpointView:
    return out.CheckpointView(
        step=found.step,
        tier=found.tier,
        ranks=found.ranks,
        world=found.world,
        complete=found.complete,
        bytes=found.bytes,
        sealed_at=rfc3339(found.sealed_at),
    )
