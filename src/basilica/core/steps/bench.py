"""The bench probe: it has a life of its own and never delays or fails the run; the run's end ends it."""

from dataclasses import replace

from basilica.core import policy
from basilica.core.actions import EndProbe, Probe
from basilica.core.events import Reason
from basilica.core.phase import BenchPhase
from basilica.core.status import WORLD_READY, BenchStatus
from basilica.core.steps.turn import Turn

_EVENTS = {
    BenchPhase.RUNNING: Reason.BENCH_STARTED,
    BenchPhase.SUCCEEDED: Reason.BENCH_SUCCEEDED,
    BenchPhase.FAILED: Reason.BENCH_FAILED,
    BenchPhase.TIMED_OUT: Reason.BENCH_TIMED_OUT,
    BenchPhase.SKIPPED: Reason.BENCH_SKIPPED,
}


def follow_the_bench(turn: Turn) -> None:
    if turn.spec.bench is None:
        return
    bench = turn.status.bench or BenchStatus()
    if not bench.phase.terminal:
        bench = _turn_bench(turn, bench, turn.spec.bench.placement)
    elif turn.seen.bench is not None and not turn.seen.bench.phase.terminal:
        turn.actions.append(EndProbe())  # the one that came with its end may have been lost
    turn.status = replace(turn.status, bench=bench)


def _turn_bench(turn: Turn, bench: BenchStatus, placement: str) -> BenchStatus:
    seen = turn.seen.bench
    if seen is not None and seen.phase.terminal:
        if seen.phase is BenchPhase.SUCCEEDED and bench.phase is BenchPhase.PENDING:  # it ran between two looks
            _tell(turn, BenchPhase.RUNNING, "")
            bench = replace(bench, started_at=turn.now)
        _tell(turn, seen.phase, seen.message)
        return replace(
            bench,
            phase=seen.phase,
            completed_at=turn.now,
            message=seen.message,
            on_worker_nodes=seen.on_worker_nodes,
            result=seen.result,
        )
    if turn.ended:
        turn.actions.append(EndProbe())
        return _end(turn, bench, BenchPhase.SKIPPED, "the run ended before the probe was done")
    # Its time begins when the run is ready: before that there is nothing to probe.
    ready_at = next((m.at for m in turn.status.milestones if m.name == WORLD_READY), None)
    if ready_at is None or not turn.due(ready_at + policy.BENCH_DEADLINE):
        if seen is not None and seen.phase is BenchPhase.RUNNING and bench.phase is BenchPhase.PENDING:
            _tell(turn, BenchPhase.RUNNING, seen.message)
            return replace(bench, phase=BenchPhase.RUNNING, started_at=turn.now, message=seen.message)
        if seen is None and turn.status.was_ready:
            turn.actions.append(Probe("strict" if placement == "strict" else "preferred"))
        return bench
    turn.actions.append(EndProbe())
    return _end(turn, bench, BenchPhase.TIMED_OUT, f"no result within {policy.BENCH_DEADLINE:g} s")


def _end(turn: Turn, bench: BenchStatus, phase: BenchPhase, message: str) -> BenchStatus:
    _tell(turn, phase, message)
    return replace(bench, phase=phase, completed_at=turn.now, message=message)


def _tell(turn: Turn, phase: BenchPhase, message: str) -> None:
    bad = phase in (BenchPhase.FAILED, BenchPhase.TIMED_OUT)
    turn.say(_EVENTS[phase], message or f"bench probe: {phase}", warning=bad)
