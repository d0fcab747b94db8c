"""Workers of torchrun agents: their failures are events and failures of the run, as those of ranks are.

Each exit in an agent's journal is booked once, by its number. A worker that the agent stopped itself has not failed. An
exit whose error names a lost peer is an echo: it is recorded, and blamed only where nothing else explains it.
"""

from dataclasses import replace

from basilica.core import policy
from basilica.core.events import Reason
from basilica.core.incidents import IncidentKind
from basilica.core.phase import RankPhase
from basilica.core.seen import SeenAgent, SeenWorkerExit
from basilica.core.steps.turn import Trouble, Turn
from basilica.core.world import EXITED_EARLY, RankAgent, RankExit, RankStatus

ALONE_AFTER_SECONDS = 1.0  # workers that end together exit within this time of each other


def book_workers(turn: Turn, rank: RankStatus, seen: SeenAgent | None) -> RankStatus:
    """Book what the agent's journal has that is not booked yet."""
    if seen is None:
        return rank
    known = (
        rank.agent
        if rank.agent is not None and rank.agent.pid == seen.pid
        else RankAgent(pid=seen.pid, nproc=seen.nproc)
    )
    again = seen.round > known.round >= 1
    agent = replace(
        known,
        round=seen.round,
        group_rank=seen.group_rank,
        world=seen.world,
        first_torch_rank=seen.first_torch_rank,
        pids=seen.pids,
        early=tuple(exit for exit in known.early if exit.finished_at >= (seen.executing_since or 0.0)),
        early_told=known.early_told and seen.round == known.round,
        fell_at=known.fell_at if seen.round == known.round else None,
    )
    held = rank.held_round if seen.round == rank.held_round else None
    rank = replace(rank, agent=agent, held_round=held)
    for exit in seen.exits:
        if exit.number > known.booked and rank.agent is not None:
            rank = _book_exit(turn, rank, rank.agent, exit)
    if again and rank.rank < turn.status.world_target and not turn.ended:
        turn.say(Reason.WORKERS_RESTARTED, f"the workers of rank {rank.rank} have been started again by its agent")
    return rank


def _book_exit(turn: Turn, rank: RankStatus, agent: RankAgent, seen: SeenWorkerExit) -> RankStatus:
    exit = _exit_of(turn, rank, seen)
    booked = replace(agent, booked=seen.number)
    if seen.exit_code == 0:
        return replace(rank, agent=replace(booked, early=(*booked.early, exit)[-agent.nproc :]))
    if seen.round == booked.round and booked.fell_at is None:
        booked = replace(booked, fell_at=exit.finished_at)
    rank = replace(rank, agent=booked)
    if rank.rank >= turn.status.world_target or turn.ended or rank.phase is RankPhase.STOPPING:
        return rank
    failures = policy.keep_failure(turn.status.failures, exit, turn.status.whole_at)
    turn.status = replace(turn.status, failures=failures)
    what = f"{exit.place} {policy.describe_exit(exit)}"
    turn.say(Reason.WORKER_FAILED, what, warning=not exit.echo)
    turn.troubles.append(Trouble(IncidentKind.FAILURE, exit.finished_at, what, rank.rank, exit))
    return rank if exit.echo else replace(rank, crashes=policy.count_crash(rank.crashes, exit))


def _exit_of(turn: Turn, rank: RankStatus, seen: SeenWorkerExit) -> RankExit:
    with_output = len(turn.status.failures) < policy.LOG_TAILS_KEPT
    return RankExit(
        rank=rank.rank,
        attempt=rank.attempt,
        exit_code=seen.exit_code,
        termination_reason=seen.reason,
        restart_count=rank.restarts,
        started_at=rank.started_at,
        finished_at=min(seen.at, turn.now),
        seen_at=max(turn.now, turn.status.whole_at or turn.now),
        signal=seen.signal,
        node=rank.node,
        log_tail=seen.log_tail if with_output else (),
        traceback=seen.traceback if with_output else "",
        worker=seen.worker,
        torch_rank=seen.torch_rank,
        pid=seen.pid,
        echo=seen.echo,
        message=seen.message,
    )


def blame_early_exits(turn: Turn) -> None:
    """Blame a worker that exited 0 for the failures of its peers that name nothing but a lost peer."""
    early = [
        exit
        for rank in turn.wanted()
        if rank.agent is not None and rank.phase is RankPhase.RUNNING
        for exit in rank.agent.early
    ]
    if not early:
        return
    first = min(early, key=lambda exit: exit.finished_at)
    new = _failures_at_hand(turn)
    echoes = [exit for exit in new if exit.echo and exit.finished_at >= first.finished_at - policy.ECHO_AHEAD]
    own = [exit for exit in new if not exit.echo and exit.worker is not None]
    if echoes and not own:
        _blame(turn, replace(first, termination_reason=EXITED_EARLY, seen_at=turn.now))
    elif turn.due(first.finished_at + ALONE_AFTER_SECONDS):
        _announce_early(turn, first)


def _failures_at_hand(turn: Turn) -> list[RankExit]:
    """Return the failures of this turn and those of the open incident: agents find out one after the other."""
    last = turn.status.incidents[-1] if turn.status.incidents else None
    known = () if last is None or not last.is_open else turn.before.failures
    earlier = [exit for exit in known if last is not None and exit.seen_at >= last.seen_at]
    return earlier + [trouble.exit for trouble in turn.troubles if trouble.exit is not None]


def _blame(turn: Turn, exit: RankExit) -> None:
    rank = turn.ranks[exit.rank]
    assert rank.agent is not None
    turn.ranks[exit.rank] = replace(rank, agent=replace(rank.agent, early=()))
    turn.status = replace(turn.status, failures=(*turn.status.failures, exit))
    what = f"{exit.place} {policy.describe_exit(exit)}"
    turn.say(Reason.WORKER_FAILED, what, warning=True)
    turn.troubles.append(Trouble(IncidentKind.FAILURE, exit.finished_at, what, exit.rank, exit))


def _announce_early(turn: Turn, exit: RankExit) -> None:
    rank = turn.ranks[exit.rank]
    if rank.agent is not None and not rank.agent.early_told and len(rank.agent.early) < rank.agent.nproc:
        turn.ranks[exit.rank] = replace(rank, agent=replace(rank.agent, early_told=True))
        turn.say(Reason.WORKER_DONE, f"{exit.place} has exited with code 0; the others go on")


def cause_of_exit(turn: Turn, rank: RankStatus) -> tuple[str, bool]:
    """Return the worker's failure that made the agent of this attempt exit, in words, and whether all were echoes.

    Failures of rounds before the last one did not: the agent has started its workers again.
    """
    fell_at = None if rank.agent is None else rank.agent.fell_at
    this = rank.rank, rank.attempt
    mine = [e for e in turn.status.failures if (e.rank, e.attempt) == this and e.worker is not None]
    mine = [] if fell_at is None else [exit for exit in mine if exit.finished_at >= fell_at]
    own = [exit for exit in mine if not exit.echo]
    if not mine:
        return "", False
    first = (own or mine)[-1]
    return f"{first.place} {policy.describe_exit(first)}", not own
