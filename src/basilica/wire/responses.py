"""The models of every answer of the API. `render` fills them.

A field has the name of the fact that fills it. Its alias is its name on the wire, where that is another one.
"""

from typing import Any

from pydantic import ConfigDict, Field

from basilica.wire.base import Figure, Outgoing


class Replicas(Outgoing):
    desired: int
    ready: int


class Pod(Outgoing):
    name: str
    status: str
    node: str | None = None


class World(Outgoing):
    ready: int
    target: int
    min: int
    max: int
    below_minimum: bool


class RankReport(Outgoing):
    """The last report of a rank. A value that is not finite is "NaN", "Infinity" or "-Infinity"."""

    at: str
    step: int | None = None
    step_seconds: float | None = None
    values: dict[str, Figure]


class RankStall(Outgoing):
    """A stall: the time since which a rank has not reported, and the stacks of its threads."""

    since: str
    usual_step_seconds: float
    where: str | None = None
    stack: str | None = None


class RankAgentView(Outgoing):
    """The torchrun agent of a rank: its round, its place among the agents, and its workers by local rank."""

    round: int
    group_rank: int
    world: int
    torch_ranks: list[int]
    pids: list[int]


class CrashLoopView(Outgoing):
    """Failures of a rank, or of one of its workers, that follow each other closely."""

    count: int
    since: str
    at: str
    worker: int | None = None
    error: str | None = None


class Rank(Outgoing):
    """One rank. `cause`: what its time is charged with, since `causeSince`. `step`: the highest that it reached."""

    rank: int
    pod_name: str
    phase: str
    restarts: int
    node: str | None = Field(None, alias="nodeName")
    provider: str | None = None
    region: str | None = None
    attempt: int
    state: str
    started_at: str | None = None
    note: str | None = None
    report: RankReport | None = None
    stalled: RankStall | None = None
    cause: str | None = None
    cause_since: str | None = None
    agent: RankAgentView | None = None
    crashes: CrashLoopView | None = None
    step: int | None = None


class Exit(Outgoing):
    """The exit of a rank, or of a worker of its torchrun agent: then `worker` is its local rank. `cause`: the worker
    whose failure made the agent exit, in words."""

    rank: int
    exit_code: int
    restart_count: int
    termination_reason: str | None = None
    signal: str | None = None
    started_at: str | None = None
    finished_at: str | None = None
    node: str | None = None
    role: str | None = None
    log_tail: list[str] | None = None
    traceback: str | None = None
    worker: int | None = None
    torch_rank: int | None = None
    pid: int | None = None
    cause: str | None = None
    message: str | None = None


class CulpritView(Outgoing):
    rank: int
    exit_code: int
    termination_reason: str
    evidence: str
    confidence: str
    log_tail: list[str]
    traceback: str | None = None
    worker: int | None = None
    torch_rank: int | None = None
    pid: int | None = None
    cause: str | None = None
    message: str | None = None


class ConditionView(Outgoing):
    type: str
    status: str
    reason: str
    message: str
    since: str = Field(alias="lastTransitionTime")


class RendezvousView(Outgoing):
    backend: str
    port: int
    endpoint: str = ""
    image: str = ""
    restart_count: int = 0


class WorldSampleView(Outgoing):
    at: str = Field(alias="timestamp")
    target: int
    ready: int


class ResizeView(Outgoing):
    from_target: int
    to_target: int
    at: str = Field(alias="timestamp")
    reason: str


class MilestoneView(Outgoing):
    name: str
    at: str = Field(alias="timestamp")


class BenchPointView(Outgoing):
    size_bytes: int
    algbw_gbps: float
    busbw_gbps: float
    latency_us: float
    repeats: int


class BenchResultView(Outgoing):
    measured_at: str
    probe_node_a: str
    probe_node_b: str
    busbw_gbps_p10: float | None = None
    busbw_gbps_p50: float | None = None
    busbw_gbps_p90: float | None = None
    algbw_gbps_p50: float | None = None
    latency_us_at_1mib: float | None = Field(None, alias="latencyUsAt1mib")
    size_bytes_swept: list[int]
    method: str | None = None
    sweep: list[BenchPointView]


class BenchView(Outgoing):
    mode: str
    phase: str | None = None
    started_at: str | None = None
    completed_at: str | None = None
    message: str | None = None
    last_attempt_at: str | None = None
    last_attempt_outcome: str | None = None
    on_worker_nodes: bool | None = None
    result: BenchResultView | None = None


class UsageView(Outgoing):
    """The observed usage: running ranks are counted up to `until`, and `gpus` are at work since."""

    rank_seconds: float
    gpu_seconds: float
    gpus: int = 0
    until: str | None = None


class LossView(Outgoing):
    cause: str
    seconds: float


class GoodputView(Outgoing):
    """The account of a run's time: every second of every wanted rank has one cause.

    `seconds` has those of all ranks by cause. `least` and `most` bound the share that trained; they differ by the time
    of programs that reported no steps.
    """

    wall_seconds: float
    rank_seconds: float
    gpus_per_rank: int
    least: float
    most: float
    seconds: dict[str, float]
    steps_recomputed: int
    largest_loss: LossView | None = None


class IncidentView(Outgoing):
    """An interruption of the training, until every rank was at work again. The cost of an open one is that so far."""

    number: int
    kind: str
    at: str
    over_at: str | None = None
    what: str
    rank: int | None = None
    worker: int | None = None
    torch_rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    reason: str | None = None
    failures: int
    cost_seconds: float
    cost_gpu_seconds: float
    steps_recomputed: int


class NoticeView(Outgoing):
    """A planned change that ranks were told of. It happens when they are ready, at `until` at the latest.

    `waitingFor`: the ranks that are not ready yet. `doneAt`: when the change was made; ranks wait until it reaches
    them.
    """

    number: int
    kind: str
    since: str
    until: str
    reason: str | None = None
    target: int | None = None
    step: int | None = None
    waiting_for: list[int]
    done_at: str | None = None


class Distributed(Outgoing):
    world_size: World
    transport: str
    ranks: list[Rank]
    conditions: list[ConditionView]
    rendezvous: RendezvousView
    history: list[WorldSampleView] = Field(alias="worldSizeHistory")
    last_resize: ResizeView | None = None
    milestones: list[MilestoneView]
    bench: BenchView | None = None
    rank_exits: list[Exit]
    generation: int
    observed_generation: int
    settled: bool
    blocked_on: str
    culprit: CulpritView | None = None
    usage: UsageView
    goodput: GoodputView
    incidents: list[IncidentView]
    notice: NoticeView | None = None
    worker_exits: list[Exit]


class DeploymentResponse(Outgoing):
    instance_name: str
    friendly_name: str
    user_id: str
    namespace: str
    image: str
    state: str
    phase: str
    message: str | None = None
    url: str = ""
    public: bool = False
    replicas: Replicas
    pods: list[Pod]
    created_at: str
    version: int
    distributed: Distributed


class DeploymentSummary(Outgoing):
    """A run in `GET /deployments`: enough for a table without further requests."""

    instance_name: str
    friendly_name: str
    state: str
    phase: str
    url: str = ""
    public: bool = False
    replicas: Replicas
    created_at: str
    version: int
    world_size: World
    message: str | None = None
    finished_at: str | None = None


class DeploymentList(Outgoing):
    deployments: list[DeploymentSummary]
    total: int


class Deleted(Outgoing):
    instance_name: str
    state: str
    message: str


class EventView(Outgoing):
    """An event, in snake case as the published client reads it."""

    kind: str = Field(alias="type")
    reason: str
    message: str
    count: int
    first_at: str = Field(alias="first_timestamp")
    last_at: str = Field(alias="last_timestamp")

    model_config = ConfigDict(alias_generator=None)


class EventList(Outgoing):
    events: list[EventView]
    version: int


class CheckpointView(Outgoing):
    """One step in one tier: memory, peer or disk. Complete, if as many ranks have it as the world had."""

    step: int
    tier: str
    ranks: int
    world: int
    complete: bool
    bytes: int
    sealed_at: str


class CheckpointList(Outgoing):
    checkpoints: list[CheckpointView]
    known: bool


class RankList(Outgoing):
    ranks: list[Rank]


class Why(Outgoing):
    """The reason in one sentence, and the directory and the search path that the ranks were given."""

    instance_name: str
    friendly_name: str
    phase: str
    why: str
    workdir: str | None = None
    path: str | None = None
    virtual_env: str | None = None


class UsageRecord(Outgoing):
    """The usage of one run. `trainingSeconds` and `lostSeconds` are those of its ranks; the rest is not known."""

    instance_name: str
    friendly_name: str
    rank_seconds: float
    gpu_seconds: float
    training_seconds: float
    lost_seconds: float
    created_at: str
    ended_at: str | None = None


class UsageList(Outgoing):
    usage: list[UsageRecord]


class TroubleView(Outgoing):
    """A fault of the server as a whole, and its remedy."""

    kind: str
    message: str
    remedy: str


class Health(Outgoing):
    """The server's health, in snake case as the published client reads it. `status` is `healthy`, or `degraded` with
    the troubles named."""

    status: str
    version: str
    timestamp: str
    healthy_validators: int
    total_validators: int
    troubles: list[TroubleView] | None = None

    model_config = ConfigDict(alias_generator=None)


class ErrorDetail(Outgoing):
    code: str
    message: str
    timestamp: str
    retryable: bool
    details: dict[str, object] | None = None


class Problem(Outgoing):
    """The body of every error."""

    error: ErrorDetail


class Pruned(Outgoing):
    deleted: list[str]


class Balance(Outgoing):
    balance: str
    last_updated: str

    model_config = ConfigDict(alias_generator=None)


class BillingUsage(Outgoing):
    rentals: list[str]
    total_count: int

    model_config = ConfigDict(alias_generator=None)


class ShareTokenStatus(Outgoing):
    exists: bool


class ShareTokenRevoked(Outgoing):
    revoked: bool


class Enrolled(Outgoing):
    public_metadata: bool


class SeriesPointView(Outgoing):
    """One report, or `count` neighbouring ones: `value` is their mean, step and time are those of the last."""

    step: int | None = None
    at: str
    mean: Figure = Field(alias="value")
    min: Figure
    max: Figure
    count: int


class SeriesView(Outgoing):
    """One metric of one process of a rank over time."""

    rank: int
    worker: int
    metric: str
    points: list[SeriesPointView]


class SeriesList(Outgoing):
    series: list[SeriesView]


class Results(Outgoing):
    """The ranks' result files by rank; a rank that wrote none is absent.

    `problems`, which is absent if there are none, has the reason for each rank whose result cannot be given.
    """

    results: dict[str, Any]
    problems: dict[str, str] | None = None


class ArchiveStored(Outgoing):
    archive: str
    bytes: int


class CommandOutput(Outgoing):
    """One line of a command's answer."""

    stream: str
    text: str


class CommandExit(Outgoing):
    """The last line of a command's answer."""

    exit_code: int
