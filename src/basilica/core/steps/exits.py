"""Booking ended attempts: what an end means for its rank, and where it can change no more, its exit."""

from dataclasses import replace

from basilica.core import metering, policy
from basilica.core.events import Reason
from basilica.core.incidents import IncidentKind
from basilica.core.phase import RankPhase
from basilica.core.seen import Ended
from basilica.core.steps import accounting, workers
from basilica.core.steps.turn import Trouble, Turn
from basilica.core.world import STALLED, CrashLoop, RankExit, RankStatus


def book(turn: Turn, rank: RankStatus, ended: Ended) -> None:
    """Book one ended attempt. Its exit is recorded where it can change no more."""
    now_or_end = turn.now if turn.status.terminal_at is None else turn.status.terminal_at
    until = min(ended.finished_at, now_or_end)  # a node's clock may be ahead
    usage, rank = metering.close(turn.status.usage, rank, until)
    turn.status = replace(turn.status, usage=usage)
    in_world = rank.rank < turn.status.world_target
    for_stall = ended.stopped and rank.stop_reason == STALLED and in_world and not turn.ended
    # What we stopped because it had stalled has failed, and a restart costs it one; not what its platform took first.
    stalled = for_stall and not ended.by_platform
    exit = _exit_of(turn, rank, ended, stalled=stalled)
    turn.ends[rank.rank] = min(ended.finished_at, turn.now)
    accounting.count_repeated(turn, rank)
    rank = replace(
        rank,
        started_at=None,
        restart_at=None,
        missing_since=None,
        stop_reason="",
        note="",
        stalled=None,
        silent_since=None,
        agent=None,
        listens=False,
        ready_for=0,
        held_round=None,
        crashes=_crashes(rank, exit) if exit.failed and in_world and not ended.by_platform else rank.crashes,
    )
    if exit.failed and in_world and not ended.by_platform:
        failures = policy.keep_failure(turn.status.failures, exit, turn.status.whole_at)
        turn.status = replace(turn.status, failures=failures)
    if exit.failed and in_world and not turn.ended:
        kind = IncidentKind.LOSS if ended.by_platform else IncidentKind.FAILURE
        what = f"{exit.place} {policy.describe_exit(exit)}"
        at = min(ended.finished_at, turn.now)
        turn.troubles.append(Trouble(kind, at, what, rank.rank, None if ended.by_platform else exit))
    if turn.ended:
        _retire(turn, rank, exit, in_world)
    elif for_stall:
        _restart_or_lose(turn, rank, exit, by_platform=ended.by_platform)
    elif not in_world or ended.stopped:
        turn.ranks[rank.rank] = replace(rank, phase=RankPhase.DROPPED)
    elif exit.exit_code == 0:
        turn.exits.append(exit)
        turn.status = replace(turn.status, closed=True)
        turn.ranks[rank.rank] = replace(rank, phase=RankPhase.SUCCEEDED)
    elif ended.start_error is not None:
        turn.exits.append(exit)
        turn.start_errors[rank.rank] = ended.start_error
        turn.ranks[rank.rank] = replace(rank, phase=RankPhase.LOST)
    else:
        _restart_or_lose(turn, rank, exit, by_platform=ended.by_platform)


def _exit_of(turn: Turn, rank: RankStatus, ended: Ended, *, stalled: bool) -> RankExit:
    with_output = len(turn.exits) < policy.LOG_TAILS_KEPT
    by_itself = ended.exit_code != 0 and ended.signal is None and not ended.stopped
    cause, echo = workers.cause_of_exit(turn, rank) if by_itself else ("", False)
    return RankExit(
        rank=rank.rank,
        attempt=rank.attempt,
        exit_code=ended.exit_code,
        termination_reason=(rank.stop_reason or ended.reason) if ended.stopped else ended.reason,
        restart_count=rank.restarts,
        started_at=rank.started_at,
        finished_at=ended.finished_at,
        seen_at=max(turn.now, turn.status.whole_at or turn.now),  # in order, even if the clock was set back
        signal=ended.signal,
        node=rank.node,
        stopped=ended.stopped and not stalled,
        log_tail=ended.log_tail if with_output else (),
        traceback=ended.traceback if with_output else "",
        cause=cause,
        echo=echo,
    )


def _crashes(rank: RankStatus, exit: RankExit) -> CrashLoop | None:
    """Count the failure, unless it was counted as that of the worker which caused it."""
    return rank.crashes if exit.cause else policy.count_crash(rank.crashes, exit)


def _retire(turn: Turn, rank: RankStatus, exit: RankExit, in_world: bool) -> None:
    """After the end of the run: exits are appended as they come, and nothing starts again."""
    if exit.exit_code == 0 and not exit.stopped:
        phase = RankPhase.SUCCEEDED
    else:
        phase = RankPhase.LOST if exit.failed else RankPhase.DROPPED
    turn.ranks[rank.rank] = replace(rank, phase=phase)
    if exit.stopped and exit.started_at is None:
        record_last_failure(turn, rank)  # this attempt never started, so the one before it was the last
    elif in_world:
        turn.exits.append(exit)


def _restart_or_lose(turn: Turn, rank: RankStatus, exit: RankExit, *, by_platform: bool) -> None:
    what = f"rank {rank.rank} {policy.describe_exit(exit)}"
    if by_platform:
        turn.say(Reason.RANK_RESTARTED, f"{what}: not its own doing, it starts again")
        at = turn.now + policy.FIRST_RESTART_DELAY
        turn.ranks[rank.rank] = rank.next_attempt(restarts=rank.restarts, restart_at=at)
        return
    turn.say(Reason.RANK_FAILED, what, warning=True)
    if policy.may_restart(rank.restarts, turn.spec.max_restarts):
        restarts = rank.restarts + 1
        turn.say(Reason.RANK_RESTARTED, f"rank {rank.rank} restarts: {restarts} of {turn.spec.max_restarts}")
        at = turn.now + policy.restart_delay(restarts)
        turn.ranks[rank.rank] = rank.next_attempt(restarts=restarts, restart_at=at)
        return
    turn.exits.append(exit)
    turn.ranks[rank.rank] = replace(rank, phase=RankPhase.LOST)
    turn.say(Reason.RANK_LOST, f"rank {rank.rank} is lost: it has no restart left", warning=True)


def record_last_failure(turn: Turn, rank: RankStatus) -> None:
    """The exit of a rank that was about to restart when the run ended: it will not have another."""
    last = (rank.rank, rank.attempt - 1, None)
    mine = [e for e in turn.status.failures if (e.rank, e.attempt, e.worker) == last]
    if mine and rank.rank < turn.status.world_target and mine[-1] not in turn.exits:
        turn.exits.append(mine[-1])
