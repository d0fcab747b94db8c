"""The rules that people argue about, one function each: facts in, a decision with its reason out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from basilica.core.ends import CANCELLED, ERROR, OOM_KILLED
from basilica.core.world import EXITED_EARLY, STALLED, CrashLoop, RankExit, WorldSize

FIRST_RESTART_DELAY = 1.0
LONGEST_RESTART_DELAY = 60.0
LOST_AFTER = 30.0  # a rank that no look has shown for so long is gone
BENCH_DEADLINE = 1500.0
LOG_TAILS_KEPT = 32  # the logs themselves stay readable; a status must not grow with a thousand ranks
UNKNOWN_EXIT_CODE = -1  # where a number is demanded and nobody knows one; the reason says `Unknown`
LOOP_GAP_SECONDS = 60.0  # failures that follow each other more closely are a crash loop
LOOP_LENGTH = 3
ECHO_AHEAD = 2.0  # a process closes its connections before it has ended: its peers may fail so long before its own end
SIMULTANEOUS = 0.05  # exits so close to each other are told apart by their evidence, not by the clock

Role = Literal["culprit", "victim", "stopped"]
Confidence = Literal["high", "medium", "low"]


def restart_delay(restarts: int) -> float:
    """Seconds before the n-th restart: 1, 2, 4 … 60."""
    return float(min(LONGEST_RESTART_DELAY, FIRST_RESTART_DELAY * 2 ** min(restarts - 1, 10)))


def may_restart(restarts: int, max_restarts: int) -> bool:
    return restarts < max_restarts


def has_succeeded(world: WorldSize, wanted: int, succeeded: int, lost: int) -> bool:
    """Every rank that the world still wants has exited 0, and at least `min` of them."""
    return succeeded + lost == wanted and succeeded >= world.min


def has_failed(world: WorldSize, wanted: int, lost: int) -> bool:
    """Too few ranks can still succeed."""
    return wanted - lost < world.min


@dataclass(frozen=True, slots=True)
class Culprit:
    """The rank that failed first, with the evidence for it."""

    exit: RankExit
    evidence: str
    confidence: Confidence


def find_culprit(failures: Sequence[RankExit], whole_at: float | None) -> Culprit | None:
    """The first failure since the world was last whole: what came before has been recovered from.

    On one node the runtime's own times are compared. Clocks of several nodes are not; there the order in which the
    controller saw the exits decides. Exits that are too close to be told apart by time are told apart by evidence:
    a kill for memory or by a signal has a cause of its own, an error exit may be the echo of a peer's. An exit whose
    error names a lost peer is not the first one if a peer's own failure follows at once.
    """
    candidates = [e for e in failures if e.failed and (whole_at is None or e.seen_at >= whole_at)]
    if not candidates:
        return None
    one_clock = len({e.node for e in candidates}) == 1

    def moment(e: RankExit) -> float:
        return e.finished_at if one_clock else e.seen_at

    candidates.sort(key=lambda e: (moment(e), e.rank, e.worker is None))
    own = next((e for e in candidates if not e.echo), None)
    if own is not None and moment(own) - moment(candidates[0]) <= ECHO_AHEAD:
        candidates = [e for e in candidates if not e.echo or moment(e) >= moment(own)]
    first = moment(candidates[0])
    close = [e for e in candidates if moment(e) - first <= SIMULTANEOUS]
    best = min(close, key=lambda e: (_echo(e), moment(e), e.rank, e.worker is None))
    rivals = [e for e in close if e.rank != best.rank and _echo(e) == _echo(best)]
    what = f"{best.place} {describe_exit(best)}"
    if rivals:
        others = name_ranks(e.rank for e in rivals)
        return Culprit(best, f"{what}; {others} failed within {SIMULTANEOUS * 1000:g} ms of it", "low")
    if any(e.rank != best.rank for e in close):
        return Culprit(best, f"{what}; the others that failed with it show only an error exit", "medium")
    later = [e for e in candidates if e.rank != best.rank]
    if later:
        gap = moment(later[0]) - first
        return Culprit(best, f"{what}, {gap:.2f} s before any other rank failed", "high")
    return Culprit(best, f"{what}; no other rank failed by itself", "high")


def role_of(exit: RankExit, culprit: Culprit | None) -> Role | None:
    """Culprit, victim (it failed after the culprit had), or stopped by us; None for a clean exit."""
    if exit.stopped:
        return "stopped"
    if not exit.failed or culprit is None:
        return None
    first = culprit.exit
    mine = exit.rank == first.rank and (exit.worker is None or first.worker in (None, exit.worker))
    return "culprit" if mine else "victim"


def last_exits(exits: Iterable[RankExit]) -> list[RankExit]:
    """One exit of each rank, its last, by rank."""
    last: dict[int, RankExit] = {}
    for exit in exits:
        if exit.rank not in last or exit.attempt >= last[exit.rank].attempt:
            last[exit.rank] = exit
    return [last[rank] for rank in sorted(last)]


def describe_exit(exit: RankExit) -> str:
    if exit.cause and exit.exit_code is not None:
        return f"exited with code {exit.exit_code}, since {exit.cause}"
    if exit.termination_reason == EXITED_EARLY:
        return "exited with code 0 before its peers were done, which then failed"
    if exit.exit_code is None:
        return f"ended, nobody knows how ({exit.termination_reason})"
    if exit.termination_reason == OOM_KILLED:
        return f"was killed for memory (exit code {exit.exit_code}, OOMKilled)"
    if exit.termination_reason == STALLED:
        return f"was stopped because it had stalled (exit code {exit.exit_code})"
    if exit.signal is not None:
        why = "" if exit.termination_reason in (exit.signal, ERROR, CANCELLED) else f", {exit.termination_reason}"
        return f"was ended by {exit.signal} (exit code {exit.exit_code}{why})"
    return f"exited with code {exit.exit_code}" + (f" ({exit.error})" if exit.error else "")


def keep_failure(failures: Sequence[RankExit], new: RankExit, whole_at: float | None) -> tuple[RankExit, ...]:
    """Remember a failure; of each rank the first since the world was whole and the latest are enough."""
    kept = [e for e in failures if whole_at is None or e.seen_at >= whole_at]
    mine = [e for e in kept if (e.rank, e.worker) == (new.rank, new.worker)]
    drop = mine[1:]
    return (*(e for e in kept if e not in drop), new)


def count_crash(known: CrashLoop | None, exit: RankExit) -> CrashLoop:
    """Return the crash loop after one more failure of the rank or of its worker; a pause begins another."""
    error = exit.error or describe_exit(exit)
    if known is None or exit.finished_at - known.at > LOOP_GAP_SECONDS:
        return CrashLoop(since=exit.finished_at, at=exit.finished_at, count=1, worker=exit.worker, error=error)
    at = max(known.at, exit.finished_at)
    return replace(known, at=at, count=known.count + 1, worker=exit.worker, error=error)


def _echo(exit: RankExit) -> int:
    """Return how likely this exit is the echo of another one: 0 has a cause of its own."""
    if exit.echo:
        return 3
    if exit.termination_reason == OOM_KILLED:
        return 0
    return 1 if exit.signal is not None and exit.signal not in ("SIGABRT", "SIGPIPE") else 2


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1 and 3`, `ranks 0-5 and 9`: short, however many there are."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"rank {spans[0][0]}"
    parts: list[tuple[str, int]] = []  # with how many ranks each names
    for low, high in spans:
        if high == low + 1:
            parts += [(str(low), 1), (str(high), 1)]
        else:
            parts.append((str(low) if low == high else f"{low}-{high}", high - low + 1))
    if len(parts) > 8:
        rest = sum(count for _, count in parts[7:])
        parts = [*parts[:7], (f"{rest} more", rest)]
    *most, last = (text for text, _ in parts)
    return f"ranks {', '.join(most)} and {last}" if most else f"ranks {last}"
