"""Reports of ranks: the last values, and their series over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

POINTS_MAX = 2000
POINTS_DEFAULT = 200
ROUND_NUMBERS = (
    "diloco_round",
    "diloco_fragment",
    "diloco_replica",
    "diloco_counted",
    "diloco_weight",
    "diloco_members",
    "diloco_world",
    "diloco_bytes_up",
    "diloco_bytes_down",
    "diloco_wait_s",
    "diloco_waited_for",
    "diloco_round_s",
)
"""The metrics of a DiLoCo round that a replica reports: shown as rounds, not among the metrics of users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The last report of a rank. `step_seconds` is its usual step time, once that is known."""

    at: float
    step: int | None = None
    step_seconds: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One report, or `count` neighbouring ones: the step and time of the last of them."""

    step: int | None
    at: float
    mean: float
    min: float
    max: float
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of one rank over time. `worker` distinguishes its processes, where a launcher started several."""

    rank: int
    worker: int
    metric: str
    points: tuple[SeriesPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesQuery:
    """A query of series. None: all. Each series has at most `points`, none of them from before `since`."""

    ranks: frozenset[int] | None = None
    metrics: frozenset[str] | None = None
    since: float = 0.0
    points: int = POINTS_DEFAULT
