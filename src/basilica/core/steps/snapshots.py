"""Snapshots: restores and refused copies are events; saved steps and blocked time are booked with other changes."""

from dataclasses import replace

from basilica.core import policy
from basilica.core.accounts import duration
from basilica.core.events import Reason
from basilica.core.phase import RankPhase
from basilica.core.seen import SeenRestore, SeenSaving
from basilica.core.snapshots import (
    BOOK_EVERY,
    SAME_PROCESS_SECONDS,
    BookedRefusals,
    RankSaving,
    Snapshots,
    is_booking_due,
    newest_steps,
)
from basilica.core.steps.accounting import book_blocked
from basilica.core.steps.turn import Turn
from basilica.core.world import RankStatus

PROCESSES_KEPT = 16  # of a rank, with refusals


def book_notes(turn: Turn, rank: RankStatus, seen: SeenSaving | None) -> RankStatus:
    """Take in the notes of a rank, and make an event of each refused copy that is none yet."""
    if seen is None:
        return rank
    turn.savings[rank.rank] = seen
    known = rank.saving or RankSaving()
    booked = {each.pid: each.number for each in known.refused}
    for refusal in seen.refusals:
        if refusal.number > booked.get(refusal.pid, 0):
            booked[refusal.pid] = refusal.number
            turn.say(Reason.SNAPSHOT_REFUSED, f"rank {rank.rank}: {refusal.what}", warning=True)
    refused = tuple(BookedRefusals(pid, number) for pid, number in booked.items())[-PROCESSES_KEPT:]
    return (
        rank
        if rank.saving is not None and refused == known.refused
        else replace(rank, saving=replace(known, refused=refused))
    )


def announce_restores(turn: Turn) -> None:
    """Announce what the ranks have restored, once all that restore are done: they start together."""
    shown = {n: s for n, s in turn.savings.items() if n in turn.ranks and turn.ranks[n].phase is RankPhase.RUNNING}
    if any(saving.restoring_since is not None for saving in shown.values()):
        return
    new: dict[tuple[int, str], list[tuple[int, SeenRestore]]] = {}
    for number, saving in sorted(shown.items()):
        rank, restored = turn.ranks[number], saving.restored
        if restored is None or rank.saving is None or _is_announced(rank.saving, restored):
            continue
        turn.ranks[number] = replace(rank, saving=replace(rank.saving, restored_at=restored.at))
        if restored.step is not None:
            new.setdefault((restored.step, restored.tier), []).append((number, restored))
    for (step, tier), restores in new.items():
        ranks = policy.name_ranks(number for number, _ in restores)
        longest = max(restored.seconds for _, restored in restores)
        turn.say(Reason.RESTORED, f"{ranks} restored step {step} from {tier} in {duration(longest)}")


def _is_announced(known: RankSaving, restored: SeenRestore) -> bool:
    return known.restored_at is not None and abs(known.restored_at - restored.at) < SAME_PROCESS_SECONDS


def follow_snapshots(turn: Turn) -> None:
    """Book the saved steps and the blocked time: with other changes of the run, and now and then without."""
    if not turn.savings:
        return
    turn.write_ranks()
    saves = any(saving.snapshots for saving in turn.savings.values())
    if turn.status == turn.before and not is_booking_due(turn.before.snapshots, turn.now):
        if saves and turn.before.snapshots is not None and not turn.ended:
            turn.wakes.append(turn.before.snapshots.booked_at + BOOK_EVERY)
        return
    for number in list(turn.blocked):
        turn.ranks[number] = book_blocked(turn, turn.ranks[number], turn.now)
    known = turn.status.snapshots or Snapshots(booked_at=turn.now)
    fresh = newest_steps(saving for number, saving in turn.savings.items() if number < turn.status.world_target)
    tiers = {each.tier: each for each in (*known.saved, *fresh)}
    every = next((s.every for s in turn.savings.values() if s.every is not None), known.every)
    found = Snapshots(booked_at=turn.now, saved=tuple(tiers.values()), every=every)
    turn.write_ranks()
    changed = replace(found, booked_at=known.booked_at) != known or turn.status != turn.before
    if saves and changed:
        turn.status = replace(turn.status, snapshots=found)
    if saves and not turn.ended:
        turn.wakes.append(turn.now + BOOK_EVERY)
