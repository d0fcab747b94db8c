"""The rules of notices: when a planned change is announced, at which step ranks stop, and when it happens. Pure.

A notice is published when a planned change is due and at least one running rank reads notices. The change happens as
soon as every such rank has answered that it is ready, or at `until`. Where ranks report their steps, the notice names a
common step a little ahead of them all: a gang in lockstep then stops at one and the same step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from basilica.core.notices import Notice
from basilica.core.phase import RankPhase
from basilica.core.seen import AnswerState, SeenAnswer, SeenProgress
from basilica.core.snapshots import is_booking_due
from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus
from basilica.core.world import RankStatus

AHEAD_SECONDS = 0.25  # between the publication and the common step: ranks must have read the notice by then
AHEAD_STEPS = 2
LOCKSTEP_SECONDS = 2.0  # ranks whose steps differ by more than they take in this time are no gang in lockstep
MISSED_AFTER_SECONDS = 2.0  # some ranks have stopped and others not so long after: these have missed the common step


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A running rank whose program reads notices, as the last look showed it."""

    rank: int
    answer: SeenAnswer
    progress: SeenProgress | None = None

    def is_ready_for(self, notice: Notice) -> bool:
        return self.answer.state is AnswerState.READY and self.answer.number == notice.number

    def has_stopped_for(self, notice: Notice) -> bool:
        """Whether its program was given the notice: it takes no further step before the change."""
        given = self.answer.state in (AnswerState.GIVEN, AnswerState.READY)
        return given and self.answer.number == notice.number


def common_step(listeners: Iterable[Listener], now: float) -> int | None:
    """Return a step that every rank will have read the notice before; None if there is no such step.

    Each rank must have reported steps, and their usual time. The steps of ranks in lockstep are close to each other.
    """
    places: list[float] = []
    slowest = fastest = None
    for listener in listeners:
        seen = listener.progress
        if seen is None or not seen.step_seconds:
            return None
        places.append(seen.step + max(0.0, now - seen.at) / seen.step_seconds)
        slowest = max(slowest or 0.0, seen.step_seconds)
        fastest = min(fastest or math.inf, seen.step_seconds)
    if not places or slowest is None or fastest is None:
        return None
    if max(places) - min(places) > max(AHEAD_STEPS, LOCKSTEP_SECONDS / slowest):
        return None
    return math.ceil(max(places)) + AHEAD_STEPS + math.ceil(AHEAD_SECONDS / fastest)


def follow(notice: Notice, listeners: list[Listener], now: float) -> Notice:
    """Return the notice with another common step, and number, if ranks have missed the present one."""
    if notice.step is None:
        return notice
    mine = [each for each in listeners if each.answer.number == notice.number]
    late = any(each.answer.state is AnswerState.LATE and each.answer.at > notice.proposed_at for each in mine)
    divided = any(now >= moment for moment in look_again_at(notice, listeners))
    if not late and not divided:
        return notice
    steps = [each.answer.step for each in mine if each.answer.step is not None]
    later = max([notice.step, *steps]) + AHEAD_STEPS
    proposed = common_step(listeners, now)
    step = later if proposed is None else max(later, proposed)
    return replace(notice, number=notice.number + 1, step=step, proposed_at=now)


def look_again_at(notice: Notice, listeners: list[Listener]) -> list[float]:
    """Return when some ranks must have missed the common step that others have stopped at; empty if none may have."""
    stopped = [each.answer.at for each in listeners if each.has_stopped_for(notice)]
    if notice.step is None or not stopped or len(stopped) == len(listeners):
        return []
    return [max(notice.proposed_at, *stopped) + MISSED_AFTER_SECONDS]


def is_due(notice: Notice, listeners: list[Listener], now: float) -> bool:
    """Return whether the change happens now: every rank that reads notices is ready, or the time is up."""
    return now >= notice.until or all(each.is_ready_for(notice) for each in listeners)


def unready_ranks(notice: Notice, status: DeploymentStatus) -> list[RankStatus]:
    """Return the ranks that an announced change waits for; none once it was made."""
    if notice.done_at is not None:
        return []
    return [r for r in status.ranks if r.phase is RankPhase.RUNNING and r.listens and r.ready_for != notice.number]


def fresh_steps(spec: DeploymentSpec, status: DeploymentStatus, now: float) -> frozenset[int]:
    """Return the ranks whose steps the next look has to read anew; of the others those that were last read will do.

    These are ranks that repeat steps, those that save, if that is to be booked, and, while a change is planned, those
    that read notices.
    """
    limits = [limit for limit in (spec.ttl_seconds, spec.deadline_seconds) if limit]
    near = any(now >= status.created_at + limit - spec.notice_seconds for limit in limits)
    planned = near or spec.generation != status.observed_generation or status.notice is not None
    running = [rank for rank in status.ranks if rank.phase is RankPhase.RUNNING]
    repeating = {rank.rank for rank in running if rank.steps is not None and rank.steps.repeat_to is not None}
    saving = {rank.rank for rank in running if rank.saving is not None and is_booking_due(status.snapshots, now)}
    return frozenset(repeating | saving | {rank.rank for rank in running if rank.listens and planned})
