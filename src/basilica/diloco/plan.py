"""The planner of DiLoCo over a given link: pure functions from facts to a plan. The page `how-to/diloco` has the
formulas in words.

S is the size of the model on the wire, N the number of replicas, b the bytes a second of a link, t the time of a step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from basilica.diloco.quantize import int4, int8
from basilica.diloco.stores.cloud import LARGEST_CREATED

WIRE_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": int8().wire_bytes(1 << 20) / (1 << 20),
    "int4": int4().wire_bytes(1 << 20) / (1 << 20),
}
"""Bytes of a parameter in each form, with the scales of its blocks."""
STATE_BYTES = 8.0
"""Bytes of a parameter in a state: itself and its outer momentum, in float32."""
DAY = 86400.0
SYNC_CHOICES = (10, 20, 40, 60, 80, 100, 160, 200, 300, 400, 500, 800, 1000)
USUAL_SYNC = 100
"""The longest interval without a loss of quality."""
FRAGMENTS = 4
"""The usual number of fragments of a model; more where the part of one would be too large for a store."""
MIX = 0.5
PIECE_BYTES = 16e6
TURNS = 15
"""Sequential requests of a round: the writes of part, manifest and result, a listing before and after each, the reads
between them, and the removal of an old round."""
STATE_SHARE = 0.1
"""The largest share of the time between rounds that uploads of the agreed state may take."""
ENOUGH_ROUNDS = 32
"""With fewer rounds, the loss of eight replicas from a random start was over 1 % above that of synchronous training."""
BUSY_LINK = 0.8
"""The largest planned load of a link: a busier one will not keep up."""
PAUSE = 2.0
GROWING_PAUSES = 10
"""Listings of the store before the pause between two of them reaches its maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """The speed of a store for one replica: seconds of a small request, bytes a second with several under way."""

    put_seconds: float = 0.05
    get_seconds: float = 0.03
    list_seconds: float = 0.05
    up_bytes_per_second: float = math.inf
    down_bytes_per_second: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars. The defaults are list prices of S3 Standard in us-east-1; `egress` only counts outside its region."""

    per_1000_puts: float = 0.005
    per_1000_gets: float = 0.0004
    per_gb_egress: float = 0.09


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The known facts. `link` is the speed of one replica's link, in bytes a second, the same up and down."""

    params: float
    replicas: int
    link: float
    step_seconds: float
    goal: float = 0.95
    steps: int | None = None
    """Inner steps of the whole run, if known."""
    store: StoreSpeed = field(default_factory=StoreSpeed)
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        for name in ("params", "link", "step_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number of more than 0, not {value}")
        if self.replicas < 2:
            raise ValueError(f"replicas must be at least 2, not {self.replicas}: one has nobody to exchange with")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not 0 < self.goal < 1:
            raise ValueError(f"the goal is a share of the time, between 0 and 1, not {self.goal}")

    @property
    def up(self) -> float:
        return min(self.link, self.store.up_bytes_per_second)

    @property
    def down(self) -> float:
        return min(self.link, self.store.down_bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of one replica in `sync_every` steps."""

    bytes_up: float
    bytes_down: float
    puts: float
    gets: float
    lists: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings, and their expected effects."""

    sync_every: int
    fragments: int
    delay: int
    mix: float
    wire: str
    checkpoint_every: int
    utilisation: float
    round_seconds: float
    """The duration of one round of one fragment."""
    rounds: int | None
    """Rounds of each fragment in the whole run, if its steps are known."""
    traffic: Traffic
    intervals_per_day: float
    """Intervals of `sync_every` steps in a day."""
    less_communication: float
    """The factor by which a replica's traffic is below that of an all-reduce of gradients in fp32 at each step."""
    bytes_per_day: float
    requests_per_day: float
    request_dollars_per_day: float
    egress_dollars_per_day: float
    reaches_goal: bool

    @property
    def few_rounds(self) -> bool:
        """Whether the rounds are too few, so that the loss will be worse."""
        return self.rounds is not None and self.rounds < ENOUGH_ROUNDS


def bytes_of_round(size: float, replicas: int) -> tuple[float, float]:
    """Return one replica's bytes up (its part without its own shard, and that shard's mean) and down (twice the others'
    shards)."""
    return size, 2 * size * (replicas - 1) / replicas


def round_seconds(question: Question, size: float) -> float:
    """Return the duration of a round: upload, download, and the sequential requests."""
    up, down = bytes_of_round(size, question.replicas)
    store = question.store
    turns = TURNS * (store.put_seconds + store.get_seconds + store.list_seconds) / 3
    return up / question.up + down / question.down + turns


def utilisation(sync_every: int, step_seconds: float, stall: float) -> float:
    """Return the share of the time that is spent in inner steps."""
    work = sync_every * step_seconds
    return work / (work + stall)


def make_plan(question: Question) -> Plan:
    """Return the simplest plan that reaches the goal with a usual interval, else with the shortest; else the best."""
    plans = list(_candidates(question))
    enough = [plan for plan in plans if plan.reaches_goal]
    for plan in enough:
        if plan.sync_every <= USUAL_SYNC:
            return plan
    if enough:
        return min(enough, key=lambda plan: plan.sync_every)
    return max(plans, key=lambda plan: plan.utilisation)


def _candidates(question: Question) -> Iterator[Plan]:
    """Yield plans, the simplest first: blocking rounds in full precision, smaller forms, fragments; H rises in each."""
    for fewest in (1, FRAGMENTS):
        for wire in WIRE_BYTES:
            fragments = enough_fragments(question, wire, fewest)
            for sync_every in sorted({-(-choice // fragments) * fragments for choice in SYNC_CHOICES}):
                yield plan_for(question, sync_every=sync_every, fragments=fragments, wire=wire)


def enough_fragments(question: Question, wire: str, fewest: int = 1) -> int:
    """Return the number of fragments for which one conditional request can write a replica's part of each."""
    part = question.params * WIRE_BYTES[wire] * (question.replicas - 1) / question.replicas
    fragments = fewest
    while part / fragments > LARGEST_CREATED:
        fragments *= 2
    return fragments


def plan_for(question: Question, *, sync_every: int, fragments: int, wire: str) -> Plan:
    """Return the plan of these settings. With fragments, a round overlaps the inner steps it needs, if so many fit."""
    size = question.params * WIRE_BYTES[wire]
    each = round_seconds(question, size / fragments)
    gap = sync_every // fragments
    delay = min(math.ceil(each / question.step_seconds), gap - 1) if fragments > 1 else 0
    stall = fragments * max(0.0, each - delay * question.step_seconds)
    share = utilisation(sync_every, question.step_seconds, stall)
    interval = sync_every * question.step_seconds / share
    state = question.params * STATE_BYTES / question.replicas
    checkpoint_every = max(1, math.ceil(state / question.up / (STATE_SHARE * interval)))
    traffic = _traffic(question, size, state / checkpoint_every, fragments)
    keeps_up = traffic.bytes_up / question.up + traffic.bytes_down / question.down <= BUSY_LINK * interval
    intervals = DAY / interval
    puts = (traffic.puts + traffic.lists) * intervals * question.replicas
    gets = traffic.gets * intervals * question.replicas
    egress = traffic.bytes_down * intervals * question.replicas
    prices = question.prices
    return Plan(
        sync_every=sync_every,
        fragments=fragments,
        delay=delay,
        mix=MIX if delay else 0.0,
        wire=wire,
        checkpoint_every=checkpoint_every,
        utilisation=share,
        round_seconds=each,
        rounds=None if question.steps is None else question.steps // sync_every,
        traffic=traffic,
        intervals_per_day=intervals,
        less_communication=_synchronous_bytes(question, sync_every) / sum(bytes_of_round(size, question.replicas)),
        bytes_per_day=(traffic.bytes_up + traffic.bytes_down) * intervals * question.replicas,
        requests_per_day=puts + gets,
        request_dollars_per_day=puts / 1000 * prices.per_1000_puts + gets / 1000 * prices.per_1000_gets,
        egress_dollars_per_day=egress / 1e9 * prices.per_gb_egress,
        reaches_goal=share >= question.goal and keeps_up,
    )


def _synchronous_bytes(question: Question, steps: int) -> float:
    """Return the traffic of a replica with a ring all-reduce of its gradients, in fp32, at each of the steps."""
    size = question.params * WIRE_BYTES["fp32"]
    return steps * 4 * size * (question.replicas - 1) / question.replicas


def _traffic(question: Question, size: float, state: float, fragments: int) -> Traffic:
    """Return the traffic of one replica in an interval. `state`: bytes of the agreed state in each interval."""
    others = question.replicas - 1
    up, down = bytes_of_round(size, question.replicas)
    pieces = math.ceil(size / fragments / question.replicas / PIECE_BYTES)
    waiting = round_seconds(question, size / fragments)
    return Traffic(
        bytes_up=up + state,
        bytes_down=down,
        puts=fragments * (4 + 1 / question.replicas),
        gets=fragments * 2 * others * (1 + pieces),
        lists=fragments * (GROWING_PAUSES + waiting / PAUSE),
    )
