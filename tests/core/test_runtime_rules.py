"""The rules that runtimes share: which attempts the controller is shown, and how much of an output is recorded."""

import pytest

from basilica.runtimes.rules import ENDED_ATTEMPTS_SHOWN, TAIL_LINE_CHARS, TAIL_LINES, shown_attempts, tail_of

Attempt = tuple[int, int, bool]  # rank, number, ended


def shown(*attempts: Attempt) -> list[Attempt]:
    return shown_attempts(attempts, lambda each: each[:2], lambda each: each[2])


def test_of_each_rank_the_last_ended_attempts_are_shown_in_order() -> None:
    many = [(rank, number, True) for rank in (1, 0) for number in range(ENDED_ATTEMPTS_SHOWN + 3)]
    expected = [(rank, number, True) for rank in (0, 1) for number in range(3, ENDED_ATTEMPTS_SHOWN + 3)]
    assert shown(*many) == expected


def test_a_live_attempt_is_always_shown_and_counts_against_nobody() -> None:
    ended = [(0, number, True) for number in range(1, ENDED_ATTEMPTS_SHOWN + 1)]
    assert shown((0, 0, False), *ended) == [(0, 0, False), *ended]


@pytest.mark.parametrize(("given", "kept"), [(0, 0), (3, 3), (TAIL_LINES + 5, TAIL_LINES)])
def test_the_tail_has_a_bound(given: int, kept: int) -> None:
    lines = [f"{number} {'x' * 2 * TAIL_LINE_CHARS}" for number in range(given)]
    found = tail_of(lines)
    assert len(found) == kept
    assert all(len(line) == TAIL_LINE_CHARS for line in found)
    assert found == tuple(line[:TAIL_LINE_CHARS] for line in lines[given - kept :])
