"""Restores and snapshots in the ledger, in events and in `why`."""

from dataclasses import replace

import pytest

from basilica.core.goodput import Cause, Ledger, Segment, block, enter, totals
from basilica.core.notice_rules import fresh_steps
from basilica.core.seen import SeenAgent, SeenProgress, SeenRank, SeenRefusal, SeenRestore, SeenSaved, SeenSaving
from basilica.core.snapshots import BOOK_EVERY

from .story import CREATED, Story, done, messages, spec_of, up
from .test_goodput import amounts, steps, total


def saving(**facts: object) -> SeenSaving:
    return replace(SeenSaving(process_at=CREATED + 1, at=CREATED + 1), **facts)  # type: ignore[arg-type]


def restore(began: float, at: float, step: int | None = 40) -> SeenRestore:
    return SeenRestore(step=step, tier="memory", seconds=at - began, began_at=CREATED + began, at=CREATED + at)


def saves(rank: int, progress: SeenProgress | None, notes: SeenSaving, attempt: int = 0) -> SeenRank:
    return replace(up(rank, attempt), progress=progress, saving=notes)


def trains(last: int, until: float) -> SeenProgress:
    return steps(1, last, since=CREATED + 2, at=CREATED + until)


def trained() -> Story:
    """A rank that trains from the second second on."""
    story = Story(spec_of(1, 1, 1, max_restarts=3))
    story.all_up()
    story.look(saves(0, trains(1, 2), saving()), after=2)
    return story


def test_a_restore_is_charged_from_its_beginning_to_its_end() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(saves(0, None, saving(restoring_since=CREATED + 1)), after=3)
    assert amounts(story) == {"starting": 1, "restoring": 2}
    assert "rank 0 is restoring, for 2 s so far" in story.why
    story.look(saves(0, None, saving(restored=restore(1, 4))), after=2)
    assert amounts(story) == {"starting": 1, "restoring": 3, "unattributed": 1}
    story.look(saves(0, steps(41, 41, since=CREATED + 6, at=CREATED + 6), saving(restored=restore(1, 4))), after=2)
    assert amounts(story) == {"starting": 3, "restoring": 3, "training": 1}


def test_a_restore_that_nobody_saw_is_booked_by_its_own_times() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    notes = saving(restored=restore(1, 4))
    story.look(saves(0, steps(41, 50, since=CREATED + 6, at=CREATED + 9), notes), after=10)
    assert amounts(story) == {"starting": 3, "restoring": 3, "training": 4}


def test_a_restore_of_a_process_before_the_present_round_is_not_charged_again() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    met = SeenAgent(pid=7, nproc=1, round=2, meeting_since=CREATED + 5, executing_since=CREATED + 6)
    story.look(replace(up(0), agent=met, saving=saving(restoring_since=CREATED + 1)), after=8)
    assert "restoring" not in amounts(story)


def test_a_restore_in_the_middle_of_the_training_interrupts_it() -> None:
    story = trained()
    notes = saving(restored=restore(4, 6))
    story.look(saves(0, trains(60, 9), notes), after=8)
    assert amounts(story) == {"starting": 2, "restoring": 2, "training": 6}


def test_blocked_time_is_moved_from_the_training_when_its_segment_ends() -> None:
    story = trained()
    notes = saving(blocked_seconds=1.250001, snapshots=9, at=CREATED + 10)
    story.look(replace(done(0), progress=trains(90, 10), saving=notes), after=8)
    assert amounts(story) == {"starting": 2, "training": 6.749999, "snapshotting": 1.250001}
    assert sum(amounts(story).values()) == 10


def test_blocked_time_of_recomputed_steps_is_moved_from_these() -> None:
    story = trained()
    story.look(replace(done(0, 1), progress=trains(80, 10), saving=saving()), after=8)
    story.look(after=1)
    again = SeenSaving(process_at=CREATED + 12, at=CREATED + 14, blocked_seconds=0.5, snapshots=1)
    story.look(saves(0, steps(11, 31, since=CREATED + 12, at=CREATED + 14), again, 1), after=3)
    found = amounts(story)
    assert found["snapshotting"] == 0.5
    assert found["recomputing"] == 1.5


def test_blocked_time_is_booked_once_and_a_new_process_counts_from_zero() -> None:
    story = trained()
    seen = saving(blocked_seconds=3.0, snapshots=3, at=CREATED + 9)
    story.look(saves(0, trains(80, 10), seen), after=BOOK_EVERY)
    story.look(saves(0, trains(80, 10), seen), after=BOOK_EVERY)
    assert amounts(story)["snapshotting"] == 3.0
    beside = saving(process_at=CREATED + 1.5, blocked_seconds=2.9, snapshots=3, at=CREATED + 9)
    story.look(saves(0, trains(80, 10), beside), after=BOOK_EVERY)
    assert amounts(story)["snapshotting"] == 3.0, "a worker beside the known one was blocked at the same time"
    story.look(replace(done(0, 1), progress=trains(80, 10), saving=seen), after=1)
    story.look(after=1)
    began = story.now
    fresh = SeenSaving(process_at=began, at=began + 3, blocked_seconds=0.25, snapshots=1)
    story.look(saves(0, steps(81, 90, since=began, at=began + 3), fresh, 1), after=BOOK_EVERY)
    assert amounts(story)["snapshotting"] == 3.25
    assert total(story.status, story.now) == round((story.now - CREATED) * 1e6)


def test_nobody_can_be_blocked_for_longer_than_the_time_that_passed() -> None:
    story = trained()
    story.look(saves(0, trains(80, 10), saving(blocked_seconds=1e9, snapshots=1, at=CREATED + 9)), after=BOOK_EVERY)
    assert amounts(story) == {"starting": 2, "snapshotting": BOOK_EVERY}
    story.now += 5
    assert amounts(story) == {"starting": 2, "snapshotting": BOOK_EVERY, "training": 5}


def test_a_snapshot_alone_changes_no_status_until_a_minute_has_passed() -> None:
    story = trained()
    first = saving(blocked_seconds=0.1, snapshots=1, at=CREATED + 3)
    story.look(saves(0, trains(10, 3), first), after=1)
    booked = story.status
    later = saving(blocked_seconds=0.9, snapshots=9, at=CREATED + 20)
    story.look(saves(0, trains(10, 3), later), after=20)
    assert story.status == booked
    assert story.plan.wake_at is not None
    assert fresh_steps(story.spec, story.status, story.now) == frozenset()
    assert fresh_steps(story.spec, story.status, story.plan.wake_at) == {0}
    story.look(saves(0, trains(90, 20), later), after=BOOK_EVERY)
    assert amounts(story)["snapshotting"] == 0.9


def test_the_newest_saved_step_of_a_tier_is_one_that_all_ranks_have() -> None:
    story = Story(spec_of(1, 2, 2))
    story.all_up()
    notes = [
        saving(snapshots=1, every=5, saved=(SeenSaved(tier="memory", step=step, size=10, at=CREATED + 3),))
        for step in (40, 45)
    ]
    story.look(saves(0, trains(46, 4), notes[0]), saves(1, trains(46, 4), notes[1]), after=4)
    assert story.status.snapshots is not None
    (saved,) = story.status.snapshots.saved
    assert (saved.tier, saved.step, saved.size, story.status.snapshots.every) == ("memory", 40, 20, 5)


def test_a_refused_copy_is_one_event_and_a_gang_that_restored_another() -> None:
    story = Story(spec_of(1, 2, 2))
    story.all_up()
    refused = (SeenRefusal(pid=7, number=1, what="shard 0 of step 40 on disk has a wrong checksum"),)
    restoring = saving(restoring_since=CREATED + 1, refusals=refused)
    done_at = saving(restored=restore(1, 2), refusals=refused)
    story.look(saves(0, None, restoring), saves(1, None, done_at), after=2)
    assert messages(story.plan, "SnapshotRefused") == [
        "rank 0: shard 0 of step 40 on disk has a wrong checksum",
        "rank 1: shard 0 of step 40 on disk has a wrong checksum",
    ]
    assert not messages(story.plan, "Restored")
    story.look(saves(0, None, done_at), saves(1, None, done_at), after=1)
    assert messages(story.plan, "Restored") == ["ranks 0 and 1 restored step 40 from memory in 1 s"]
    story.look(saves(0, None, done_at), saves(1, None, done_at), after=1)
    assert not story.plan.events
    second = replace(done_at, refusals=(*refused, SeenRefusal(pid=8, number=1, what="another")))
    story.look(saves(0, None, second), saves(1, None, done_at), after=1)
    assert messages(story.plan, "SnapshotRefused") == ["rank 0: another"]


def test_a_fresh_start_is_no_event() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(saves(0, None, saving(restored=restore(1, 2, step=None))), after=2)
    assert not messages(story.plan, "Restored")


@pytest.mark.parametrize(("amount", "until", "blocked"), [(5, 1.0, 5), (2_000_000, 1.0, 1_000_000), (7, 0.0, 0)])
def test_a_part_of_a_segment_is_charged_to_snapshots(amount: int, until: float, blocked: int) -> None:
    segment = block(Segment(Cause.TRAINING, 0.0), amount, until)
    assert segment.blocked == blocked
    assert sum(totals(Ledger(), [segment], 3.0).values()) == 3_000_000
    ledger, after = enter(Ledger(), segment, Cause.RENDEZVOUS, 0.5)
    assert ledger.training + ledger.snapshotting == 500_000
    assert after.blocked == 0
