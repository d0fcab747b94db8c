"""Metering: the rank-seconds and GPU-seconds of what was seen to run, never going backwards."""

from dataclasses import replace

from basilica.core.phase import RankPhase
from basilica.core.status import DeploymentStatus, Usage
from basilica.core.world import RankStatus


def total(status: DeploymentStatus, now: float | None = None) -> Usage:
    """Everything accounted for so far, ended attempts and running ones; with `now`, running ones up to then.

    Without `now` they count up to the last change of the status.
    """
    usage = status.usage
    for rank in status.ranks:
        usage = _add(usage, rank, _open_seconds(_running_until(status, rank, now)))
    return usage


def counted_until(status: DeploymentStatus, now: float | None = None) -> float | None:
    """The moment up to which `total` counts; None if nothing runs."""
    metered = (_running_until(status, rank, now).metered_until for rank in status.ranks)
    return max((moment for moment in metered if moment is not None), default=None)


def _running_until(status: DeploymentStatus, rank: RankStatus, now: float | None) -> RankStatus:
    """A rank that is believed to run goes on; one that is out of sight, or whose run has ended, counts no further."""
    runs = rank.phase in (RankPhase.RUNNING, RankPhase.STOPPING) and rank.missing_since is None
    if now is None or status.phase.terminal or not runs:
        return rank
    return advance(rank, now)


def advance(rank: RankStatus, until: float) -> RankStatus:
    """Account for a rank that was seen running at `until`."""
    if rank.started_at is None:
        return rank
    return replace(rank, metered_until=max(until, rank.started_at, rank.metered_until or rank.started_at))


def close(usage: Usage, rank: RankStatus, ended_at: float) -> tuple[Usage, RankStatus]:
    """Move an ended attempt's time to the closed account; what a look had already counted stays counted."""
    if rank.started_at is None:
        return usage, rank
    rank = advance(rank, ended_at)
    return _add(usage, rank, _open_seconds(rank)), replace(rank, metered_until=None)


def _open_seconds(rank: RankStatus) -> float:
    if rank.started_at is None or rank.metered_until is None:
        return 0.0
    return rank.metered_until - rank.started_at


def _add(usage: Usage, rank: RankStatus, seconds: float) -> Usage:
    return Usage(usage.rank_seconds + seconds, usage.gpu_seconds + seconds * rank.gpus)
