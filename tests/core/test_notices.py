"""Notices: planned changes wait for ranks that read them, until they are ready or the time is up."""

from dataclasses import replace

import pytest

from basilica.core.actions import Announce, Launch, Stop
from basilica.core.notice_rules import AHEAD_STEPS, Listener, common_step, fresh_steps
from basilica.core.notices import Notice, NoticeKind
from basilica.core.phase import Phase, RankPhase
from basilica.core.seen import AnswerState, Leaving, SeenAgent, SeenAnswer, SeenProgress, SeenRank

from .story import CREATED, Story, messages, spec_of, stopped, up


def listens(rank: int, state: AnswerState = AnswerState.LISTENING, number: int = 0, **facts: object) -> SeenRank:
    answer = SeenAnswer(state=state, number=number, at=CREATED + 5)
    return replace(up(rank), answer=answer, **facts)  # type: ignore[arg-type]


def ready(rank: int, number: int = 1, **facts: object) -> SeenRank:
    return listens(rank, AnswerState.READY, number, **facts)


def in_round(seen: SeenRank, round: int) -> SeenRank:
    of = SeenAgent(pid=7, nproc=1, round=round, meeting_since=CREATED, executing_since=CREATED + round)
    return replace(seen, agent=of)


def notice_of(story: Story) -> Notice:
    assert story.status.notice is not None
    return story.status.notice


def shrinking(**settings: object) -> Story:
    """Three ranks that listen, and somebody wants two."""
    story = Story(spec_of(1, 3, 4, **settings))
    story.all_up()
    story.look(*(listens(n) for n in range(3)), after=5)
    story.scale(2)
    return story


class TestWaiting:
    def test_a_change_waits_until_all_listeners_are_ready(self) -> None:
        story = shrinking()
        plan = story.look(*(listens(n) for n in range(3)))
        assert notice_of(story).kind is NoticeKind.SCALE
        assert (story.status.world_target, story.stopping) == (3, [])
        assert messages(plan, "NoticePublished") == ["ranks were told of the resize to 2 ranks"]
        assert "waiting for ranks 0-2 to be ready for the resize to 2 ranks, 30 s at most" in story.why
        story.look(ready(0), listens(1), ready(2), after=1)
        assert "waiting for rank 1 to be ready" in story.why
        story.look(ready(0), ready(1), ready(2), after=1)
        assert (story.status.world_target, story.stopping) == (2, [(2, 0)])

    def test_the_notice_is_announced_before_and_until_the_change_has_reached_the_ranks(self) -> None:
        story = shrinking()
        story.look(*(in_round(listens(n), 1) for n in range(3)))
        story.look(*(in_round(ready(n), 1) for n in range(3)), after=1)
        assert notice_of(story).done_at == story.now, "ranks wait on, so that they take no step in between"
        story.look(*(in_round(ready(n), 1) for n in range(2)), stopped(2), after=1)
        assert story.status.notice is not None
        story.look(*(in_round(listens(n), 2) for n in range(2)), after=1)
        assert story.status.notice is None

    def test_the_change_happens_at_the_limit(self) -> None:
        story = shrinking(notice_seconds=12.0)
        story.look(*(listens(n) for n in range(3)))
        assert story.plan.wake_at == story.now + 12
        plan = story.look(ready(0), listens(1), listens(2), after=12)
        assert story.stopping == [(2, 0)]
        assert messages(plan, "NoticeOver") == [
            "the resize to 2 ranks did not wait any longer: 2 of 3 ranks were not ready in time"
        ]

    def test_without_listeners_it_happens_at_once(self) -> None:
        story = Story(spec_of(1, 3, 4))
        story.all_up()
        story.scale(2)
        story.look(up(0), up(1), up(2))
        assert (story.status.notice, story.stopping) == (None, [(2, 0)])

    def test_a_change_that_is_taken_back_releases_the_ranks(self) -> None:
        story = shrinking()
        story.look(*(listens(n) for n in range(3)))
        story.scale(3)
        story.look(*(ready(n) for n in range(3)), after=1)
        assert (story.status.notice, story.status.world_target, story.stopping) == (None, 3, [])

    def test_a_cancel_waits_for_no_longer_than_the_grace(self) -> None:
        story = shrinking(grace_seconds=4.0)
        story.cancel()
        story.look(*(listens(n) for n in range(3)))
        assert (notice_of(story).kind, notice_of(story).until) == (NoticeKind.CANCEL, story.now + 4)
        story.look(*(ready(n) for n in range(3)), after=1)
        assert story.phase() is Phase.CANCELLED

    def test_a_deletion_waits_for_nobody(self) -> None:
        story = shrinking()
        story.delete()
        story.look(*(listens(n) for n in range(3)))
        assert story.phase() is Phase.CANCELLED

    def test_a_deadline_is_announced_ahead(self) -> None:
        story = Story(spec_of(1, 1, 1, deadline_seconds=100.0))
        story.all_up()
        story.look(listens(0), after=5)
        assert story.plan.wake_at == CREATED + 70
        story.look(listens(0), after=65)
        assert (notice_of(story).kind, notice_of(story).until) == (NoticeKind.DEADLINE, CREATED + 100)
        story.look(ready(0), after=5)
        assert story.phase() is Phase.FAILED

    def test_a_fresh_gang_waits_too(self) -> None:
        story = Story(spec_of(2, 2, 2))
        story.all_up()
        story.spec = story.spec.restarted()
        story.look(listens(0), listens(1), after=1)
        assert (notice_of(story).kind, story.stopping) == (NoticeKind.RESTART, [])
        story.look(ready(0), ready(1), after=1)
        assert story.stopping == [(0, 0), (1, 0)]


class TestNewcomers:
    def test_they_start_at_once_and_join_when_the_others_are_ready(self) -> None:
        story = Story(spec_of(1, 2, 4))
        story.all_up()
        story.look(*(in_round(listens(n), 1) for n in range(2)))
        story.scale(3)
        plan = story.look(*(in_round(listens(n), 1) for n in range(2)), after=1)
        assert Launch(2, 0, 3) in plan.actions
        assert (story.status.admitted, story.status.notice) == (2, None), "training goes on while the new one starts"
        story.look(*(in_round(listens(n), 1) for n in range(2)), up(2), after=3)
        assert story.status.notice is None
        waits = in_round(up(2), 0)
        story.look(*(in_round(listens(n), 1) for n in range(2)), waits, after=1)
        assert notice_of(story).target == 3
        story.look(*(in_round(ready(n), 1) for n in range(2)), waits, after=1)
        assert story.status.admitted is None

    def test_without_listeners_they_join_at_once(self) -> None:
        story = Story(spec_of(1, 2, 4))
        story.all_up()
        story.scale(3)
        story.look(up(0), up(1))
        assert story.status.admitted is None

    def test_ranks_are_told_of_a_world_without_those_that_wait(self) -> None:
        from basilica.core.mesh import SeenMesh

        story = Story(spec_of(1, 2, 4))
        mesh = SeenMesh(hosts=("here",))
        story.look(mesh=mesh)
        story.look(listens(0), listens(1), mesh=mesh)
        story.scale(4)
        plan = story.look(listens(0), listens(1), mesh=mesh)
        (announced,) = [a.announcement for a in plan.actions if isinstance(a, Announce)]
        assert (announced.world, announced.admitted) == (2, 2)


class TestLeaving:
    def test_a_rank_that_the_platform_takes_is_stopped_when_all_are_ready(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        leaving = Leaving(kind="preemption", until=CREATED + 40, reason="spot capacity")
        story.look(listens(0), listens(1, leaving=leaving), after=10)
        assert (notice_of(story).kind, notice_of(story).until) == (NoticeKind.PREEMPTION, CREATED + 40)
        plan = story.look(ready(0), ready(1, leaving=leaving), after=1)
        assert [a.rank for a in plan.actions if isinstance(a, Stop)] == [1]
        assert story.rank(1).phase is RankPhase.STOPPING
        assert story.rank(1).stop_reason == "Preemption"


class TestCommonStep:
    def listener(self, rank: int, step: int, at: float, every: float | None = 0.1) -> Listener:
        progress = SeenProgress(first_at=0.0, first_step=1, at=at, step=step, step_seconds=every)
        return Listener(rank=rank, answer=SeenAnswer(state=AnswerState.LISTENING), progress=progress)

    def test_it_is_ahead_of_all_by_the_time_that_a_notice_needs(self) -> None:
        step = common_step([self.listener(0, 100, 50.0), self.listener(1, 101, 50.0)], 50.0)
        assert step == 101 + AHEAD_STEPS + 3

    def test_old_reports_are_extrapolated(self) -> None:
        assert common_step([self.listener(0, 100, 50.0)], 51.0) == 110 + AHEAD_STEPS + 3

    @pytest.mark.parametrize("every", [None, 0.0])
    def test_there_is_none_without_a_usual_step_time(self, every: float | None) -> None:
        assert common_step([self.listener(0, 100, 50.0, every)], 50.0) is None

    def test_there_is_none_for_ranks_that_are_far_from_each_other(self) -> None:
        assert common_step([self.listener(0, 100, 50.0), self.listener(1, 900, 50.0)], 50.0) is None

    def test_a_late_rank_makes_it_later_under_another_number(self) -> None:
        story = shrinking()
        seen = SeenProgress(first_at=CREATED, first_step=1, at=CREATED + 5, step=50, step_seconds=0.1)
        story.look(*(listens(n, progress=seen) for n in range(3)))
        first = notice_of(story)
        assert first.step == 50 + AHEAD_STEPS + 3
        late = SeenAnswer(state=AnswerState.LATE, number=1, step=60, at=CREATED + 6)
        now = replace(seen, step=60, at=CREATED + 6)
        story.look(*(replace(listens(n, progress=now), answer=late) for n in range(3)), after=1.5)
        assert notice_of(story).number == 2
        assert (notice_of(story).step or 0) > 60

    def test_steps_are_read_anew_while_a_change_is_planned(self) -> None:
        story = shrinking()
        assert fresh_steps(story.spec, story.status, story.now) == {0, 1, 2}
        story.spec = replace(story.spec, generation=story.status.observed_generation)
        assert fresh_steps(story.spec, story.status, story.now) == frozenset()

    def test_a_rank_that_saves_for_long_has_not_missed_it(self) -> None:
        story = shrinking()
        seen = SeenProgress(first_at=CREATED, first_step=1, at=CREATED + 5, step=50, step_seconds=0.1)
        story.look(*(listens(n, progress=seen) for n in range(3)))
        stopped_at = replace(seen, step=notice_of(story).step or 0, at=CREATED + 6)
        saving = [
            listens(0, AnswerState.GIVEN, 1, progress=stopped_at),
            *(ready(n, progress=stopped_at) for n in (1, 2)),
        ]
        story.look(*saving, after=1)
        story.look(*saving, after=20)
        assert notice_of(story).number == 1
        unaware = [listens(0, AnswerState.SEEN, 1, progress=seen), *(ready(n, progress=stopped_at) for n in (1, 2))]
        story.look(*unaware)
        assert notice_of(story).number == 2
