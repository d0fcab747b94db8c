"""How an end is named: one rule for all runtimes and executors."""

import pytest

from basilica.core.ends import describe, exit_code_of, killer_in, killer_of, memory_kills_in, reason_of, signal_name


@pytest.mark.parametrize(
    ("code", "exit_code", "killer", "text"),
    [
        (0, 0, None, "exited with code 0"),
        (7, 7, None, "exited with code 7"),
        (-9, 137, "SIGKILL", "killed by SIGKILL"),
        (-11, 139, "SIGSEGV", "killed by SIGSEGV"),
        (-40, 168, "signal 40", "killed by signal 40"),
    ],
)
def test_a_code_as_python_has_it(code: int, exit_code: int, killer: str | None, text: str) -> None:
    assert (exit_code_of(code), killer_of(code), describe(code)) == (exit_code, killer, text)


def test_real_time_signals_have_numbers_for_names_but_for_the_first_and_the_last() -> None:
    assert [signal_name(number) for number in (34, 35, 63, 64)] == ["SIGRTMIN", "signal 35", "signal 63", "SIGRTMAX"]


@pytest.mark.parametrize(
    ("exit_code", "killer"), [(0, None), (128, None), (137, "SIGKILL"), (168, "signal 40"), (193, None), (255, None)]
)
def test_an_exit_code_stands_for_a_signal_only_where_there_is_one(exit_code: int, killer: str | None) -> None:
    assert killer_in(exit_code) == killer


@pytest.mark.parametrize(
    ("reason", "exit_code", "killer", "facts"),
    [
        ("Completed", 0, None, {}),
        ("Completed", 0, None, {"memory_kills": 1}),
        ("Error", 3, None, {}),
        ("Error", 3, None, {"memory_kills": 1}),
        ("SIGKILL", 137, "SIGKILL", {}),
        ("OOMKilled", 137, "SIGKILL", {"memory_kills": 1}),
        ("OOMKilled", 137, None, {"memory_kills": 2}),
        ("SIGTERM", 143, "SIGTERM", {"memory_kills": 1}),
        ("StartError", 127, None, {"start_error": "no such program"}),
        ("Cancelled", 137, "SIGKILL", {"stopped": True, "memory_kills": 1}),
        ("Cancelled", None, None, {"stopped": True, "start_error": "stopped before"}),
        ("Error", None, None, {}),
    ],
)
def test_a_reason_has_evidence(reason: str, exit_code: int | None, killer: str | None, facts: dict[str, bool]) -> None:
    assert reason_of(exit_code, killer, **facts) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n", 1),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 2),
        ("", 0),
        ("oom_kill many\n", 0),
    ],
)
def test_the_kernel_s_count_of_memory_kills(text: str, kills: int) -> None:
    assert memory_kills_in(text) == kills
