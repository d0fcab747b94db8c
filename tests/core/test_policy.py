"""The rules that people argue about: restarts, verdicts, and who failed first."""

import pytest

from basilica.core.policy import (
    describe_exit,
    find_culprit,
    has_failed,
    has_succeeded,
    keep_failure,
    may_restart,
    name_ranks,
    restart_delay,
    role_of,
)
from basilica.core.world import RankExit, WorldSize

from .story import exit_of


def oom(rank: int, at: float = 0.0, **more: object) -> RankExit:
    return exit_of(rank, 137, at, reason="OOMKilled", signal="SIGKILL")


def test_restarts_wait_one_second_and_double_up_to_a_minute() -> None:
    assert [restart_delay(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert restart_delay(1_000_000) == 60


def test_a_rank_restarts_as_often_as_its_budget_says() -> None:
    assert not may_restart(0, 0)
    assert may_restart(1, 2)
    assert not may_restart(2, 2)


@pytest.mark.parametrize(
    ("succeeded", "lost", "over"),
    [(3, 0, True), (2, 1, True), (1, 2, False), (2, 0, False), (0, 0, False)],
)
def test_success_is_every_wanted_rank_done_and_at_least_min_of_them_well(succeeded: int, lost: int, over: bool) -> None:
    assert has_succeeded(WorldSize(2, 3, 3), 3, succeeded, lost) is over


def test_failure_is_too_few_that_can_still_succeed() -> None:
    world = WorldSize(2, 3, 3)
    assert [has_failed(world, 3, lost) for lost in range(4)] == [False, False, True, True]


class TestCulprit:
    def test_nobody_without_a_failure(self) -> None:
        assert find_culprit([], None) is None
        assert find_culprit([exit_of(0, 0), exit_of(1, 143, stopped=True)], None) is None

    def test_the_only_failure_is_a_sure_one(self) -> None:
        culprit = find_culprit([exit_of(1, 3)], None)
        assert culprit is not None
        assert (culprit.exit.rank, culprit.confidence) == (1, "high")
        assert culprit.evidence == "rank 1 exited with code 3; no other rank failed by itself"

    def test_on_one_node_the_runtimes_own_times_decide_whatever_the_order_of_looks(self) -> None:
        culprit = find_culprit([exit_of(0, 1, 12.5, seen_at=13), exit_of(1, 1, 10.0, seen_at=14)], None)
        assert culprit is not None
        assert (culprit.exit.rank, culprit.confidence) == (1, "high")
        assert "2.50 s before any other rank failed" in culprit.evidence

    def test_clocks_of_several_nodes_are_not_compared(self) -> None:
        late_clock = exit_of(0, 1, 500.0, seen_at=13, node="a")
        culprit = find_culprit([late_clock, exit_of(1, 1, 10.0, seen_at=14, node="b")], None)
        assert culprit is not None
        assert culprit.exit is late_clock

    def test_exits_of_several_nodes_in_one_look_cannot_be_told_apart(self) -> None:
        culprit = find_culprit([exit_of(1, node="a", at=9, seen_at=9), exit_of(0, node="b", at=1, seen_at=9)], None)
        assert culprit is not None
        assert (culprit.exit.rank, culprit.confidence) == (0, "low")
        assert culprit.evidence == "rank 0 exited with code 1; rank 1 failed within 50 ms of it"

    def test_at_the_same_moment_a_kill_for_memory_beats_an_error_exit(self) -> None:
        culprit = find_culprit([exit_of(0, 1, 10.0), oom(1, 10.04)], None)
        assert culprit is not None
        assert (culprit.exit.rank, culprit.confidence) == (1, "medium")

    def test_a_kill_for_memory_a_second_later_does_not(self) -> None:
        culprit = find_culprit([exit_of(0, 1, 10.0), oom(1, 11.0)], None)
        assert culprit is not None
        assert (culprit.exit.rank, culprit.confidence) == (0, "high")

    def test_a_signal_beats_an_error_and_memory_beats_a_signal(self) -> None:
        error, segv = exit_of(0), exit_of(1, 139, reason="SIGSEGV", signal="SIGSEGV")
        abort = exit_of(3, 134, reason="SIGABRT", signal="SIGABRT")
        first = [find_culprit(these, None) for these in ([error, segv], [error, segv, oom(2)], [error, abort])]
        assert [c and c.exit.rank for c in first] == [1, 2, 0]  # an abort is what a lost peer causes
        assert [c and c.confidence for c in first] == ["medium", "medium", "low"]

    def test_failures_from_before_the_world_was_whole_again_are_forgiven(self) -> None:
        recovered, fatal = exit_of(0, 1, 10.0), exit_of(1, 1, 30.0)
        culprit = find_culprit([recovered, fatal], 20.0)
        assert culprit is not None
        assert culprit.exit is fatal

    def test_a_failure_in_the_very_moment_of_wholeness_counts(self) -> None:
        assert find_culprit([exit_of(0, 1, 20.0)], 20.0) is not None

    def test_a_rank_that_failed_twice_is_not_another_rank(self) -> None:
        culprit = find_culprit([exit_of(1, 1, 10.0), exit_of(1, 1, 15.0, attempt=1)], None)
        assert culprit is not None
        assert culprit.evidence == "rank 1 exited with code 1; no other rank failed by itself"

    def test_roles(self) -> None:
        first, second = exit_of(0, 1, 1.0), exit_of(1, 1, 5.0)
        culprit = find_culprit([first, second], None)
        assert role_of(first, culprit) == "culprit"
        assert role_of(second, culprit) == "victim"
        assert role_of(exit_of(2, 143, stopped=True), culprit) == "stopped"
        assert role_of(exit_of(2, 0), culprit) is None
        assert role_of(exit_of(2, 1), None) is None


def test_of_each_rank_the_first_and_the_latest_failure_are_remembered() -> None:
    kept: tuple[RankExit, ...] = ()
    for attempt in range(5):
        kept = keep_failure(kept, exit_of(1, 1, float(attempt), attempt=attempt), None)
    kept = keep_failure(kept, exit_of(0, 1, 9.0), None)
    assert [(e.rank, e.attempt) for e in kept] == [(1, 0), (1, 4), (0, 0)]


def test_what_was_recovered_from_is_forgotten() -> None:
    kept = keep_failure([exit_of(0, 1, 1.0), exit_of(1, 1, 5.0)], exit_of(2, 1, 6.0), 5.0)
    assert [e.rank for e in kept] == [1, 2]


@pytest.mark.parametrize(
    ("exit", "text"),
    [
        (exit_of(0, 3), "exited with code 3"),
        (oom(0), "was killed for memory (exit code 137, OOMKilled)"),
        (exit_of(0, 1, reason="OOMKilled"), "was killed for memory (exit code 1, OOMKilled)"),
        (exit_of(0, 137, signal="SIGKILL", reason="SIGKILL"), "was ended by SIGKILL (exit code 137)"),
        (exit_of(0, None, reason="Unknown"), "ended, nobody knows how (Unknown)"),
    ],
)
def test_an_exit_is_described_by_its_evidence(exit: RankExit, text: str) -> None:
    assert describe_exit(exit) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([3, 1, 1], "ranks 1 and 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 1, 2, 3, 4, 5, 9], "ranks 0-5 and 9"),
        ([0, 2, 3, 7], "ranks 0, 2, 3 and 7"),
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12 and 14"),
        (range(0, 18, 2), "ranks 0, 2, 4, 6, 8, 10, 12 and 2 more"),
        ([*range(0, 14, 2), *range(20, 30), 50], "ranks 0, 2, 4, 6, 8, 10, 12 and 11 more"),
    ],
)
def test_many_ranks_have_short_names(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
