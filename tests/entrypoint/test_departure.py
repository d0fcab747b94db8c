"""How long a rank goes on after the platform's signal, and by which clock it is told of planned changes."""

import pytest

from basilica.core.notices import Notice, NoticeKind
from basilica.core.seen import SeenAgent
from basilica.rank.departure import Departure
from basilica.rank.notice_relay import clock_difference, pids_to_signal, to_publish

NOTICE = Notice(number=3, kind=NoticeKind.SCALE, since=1000.0, until=1030.0, reason="more ranks", target=4)


def test_before_the_signal_nothing_is_due() -> None:
    departure = Departure(30.0)
    assert (departure.told, departure.is_due(1e9, listens=False), departure.due_in(0.0)) == (False, False, None)


def test_a_listener_goes_on_for_the_time_of_a_notice() -> None:
    departure = Departure(30.0)
    assert departure.tell(100.0, listens=True)
    assert not departure.is_due(129.9, listens=True)
    assert departure.due_in(110.0) == 20.0
    assert departure.is_due(130.0, listens=True)
    assert departure.due_in(130.0) is None


def test_a_rank_that_listens_no_more_ends() -> None:
    departure = Departure(30.0)
    departure.tell(100.0, listens=True)
    assert departure.is_due(101.0, listens=False)


@pytest.mark.parametrize(("seconds", "listens"), [(30.0, False), (0.0, True)])
def test_nobody_waits_for_a_rank_without_a_listener_or_without_time(seconds: float, listens: bool) -> None:
    departure = Departure(seconds)
    assert not departure.tell(100.0, listens=listens)
    assert departure.is_due(100.0, listens=listens)


def test_a_second_signal_ends_the_wait() -> None:
    departure = Departure(30.0)
    departure.tell(100.0, listens=True)
    assert not departure.tell(101.0, listens=True)
    assert departure.is_due(101.0, listens=True)


@pytest.mark.parametrize(
    ("now", "written_now", "left"),
    [
        (1000.0, True, 30.0),
        (1000.2, True, 30.0),
        (8200.0, True, 30.0),  # this machine is two hours ahead
        (500.0, True, 30.0),  # or behind
        (1010.0, False, 20.0),  # found later: the clocks count
        (500.0, False, 30.0),  # but it never had more time than that
        (8200.0, False, 0.0),
    ],
)
def test_the_time_that_a_notice_leaves_does_not_depend_on_clocks(now: float, written_now: bool, left: float) -> None:
    until = to_publish(NOTICE, clock_difference(NOTICE, now, written_now=written_now)).until
    assert max(0.0, until - now) == pytest.approx(left)


def test_a_later_step_is_proposed_later_than_its_notice_began() -> None:
    again = Notice(number=4, kind=NoticeKind.SCALE, since=1000.0, until=1030.0, reason="", step=9, proposed_at=1012.0)
    assert to_publish(again, clock_difference(again, 8000.0, written_now=True)).until == 8018.0


@pytest.mark.parametrize(
    ("agent", "pids"),
    [
        (None, (70,)),
        (SeenAgent(pid=70, nproc=2), ()),
        (SeenAgent(pid=70, nproc=2, pids=(71, 72), meeting_since=5.0), ()),
        (SeenAgent(pid=70, nproc=2, pids=(71, 72), executing_since=5.0), (71, 72)),
        (SeenAgent(pid=70, nproc=2, pids=(0, 1, 71), executing_since=5.0), (71,)),
    ],
)
def test_a_signal_goes_to_who_trains(agent: SeenAgent | None, pids: tuple[int, ...]) -> None:
    assert pids_to_signal(70, agent) == pids
