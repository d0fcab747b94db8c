"""Errors carry facts, travel between processes, and read as the contract says."""

import pickle

import pytest

from basilica.client.views import RankExit
from basilica.core import errors
from basilica.core.damage import DamagedRun
from basilica.core.errors import (
    AuthenticationError,
    AuthorizationError,
    BadResult,
    BasilicaError,
    BelowMinimumWorld,
    Conflict,
    DeploymentDamaged,
    DeploymentNotFound,
    DiskFull,
    DistributedError,
    NameInUse,
    NetworkError,
    QuotaExceeded,
    RateLimitError,
    RendezvousUnavailable,
    RuntimeUnavailable,
    ServerError,
    StaleVersion,
    StoreUnavailable,
    UDTerminalState,
    ValidationError,
    WorldClosed,
    WorldSizeOutOfBounds,
)

EXITS = (RankExit(0, 0, "Completed"), RankExit(1, 137, "OOMKilled", 2), RankExit(2, -1, "Unknown"))

DAMAGED = DamagedRun(
    instance="train-abc",
    user="ann",
    namespace="u-ann",
    name="train",
    target=2,
    created_at=1.0,
    version=3,
    problem="its spec is damaged",
)

ONE_OF_EACH: list[BasilicaError] = [
    BasilicaError("something"),
    ValidationError("port", 70000, "must be within 1..65535"),
    WorldSizeOutOfBounds(9, 1, 4),
    AuthenticationError("no key"),
    AuthorizationError("not yours"),
    QuotaExceeded("ranks", 8, 6, 4),
    DeploymentNotFound("gone"),
    Conflict("twice"),
    NameInUse("train", "train-abc"),
    StaleVersion("train-abc"),
    DistributedError("something"),
    UDTerminalState("failed", 3),
    WorldClosed("train", 3),
    BelowMinimumWorld("train", "failed", 1, 2, 300.0, EXITS),
    RateLimitError(1.5),
    NetworkError("no answer within 5 s"),
    BadResult(3, "is no JSON"),
    RendezvousUnavailable("no answer from 127.0.0.1:2379"),
    ServerError(502, "bad gateway"),
    StoreUnavailable("no answer"),
    DeploymentDamaged(DAMAGED),
    DiskFull("the disk is full"),
    RuntimeUnavailable("no answer"),
]


def name_of(error: BasilicaError) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=name_of)
def test_an_error_survives_pickling_with_its_facts(error: BasilicaError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_there_is_one_of_each_in_the_tree() -> None:
    def tree(base: type[BasilicaError]) -> set[type[BasilicaError]]:
        return {base}.union(*(tree(c) for c in base.__subclasses__()))

    ours = {c for c in tree(BasilicaError) if c.__module__ == errors.__name__}
    assert {type(e) for e in ONE_OF_EACH} == ours


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=name_of)
def test_every_error_says_something(error: BasilicaError) -> None:
    assert str(error).strip()
    assert error.code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValidationError("port", 70000, "must be within 1..65535"), "port: must be within 1..65535 (got 70000)"),
        (WorldSizeOutOfBounds(9, 1, 4), "world size 9 is not within 1..4 (1 <= min <= target <= max)"),
        (DeploymentNotFound("gone"), "deployment 'gone' not found"),
        (UDTerminalState("failed", 3), "the run has ended (failed); it cannot be scaled to 3"),
        (UDTerminalState("succeeded"), "the run has ended (succeeded)"),
        (
            BelowMinimumWorld("train", "failed", 1, 2, 300, EXITS),
            "1 of 2 ranks ready; UD 'train' reached terminal phase 'failed' "
            "(rank 1: exit_code=137 reason=OOMKilled; rank 2: exit_code=-1 reason=Unknown)",
        ),
        (
            BelowMinimumWorld(
                "train", "failed", 0, 1, 300, [RankExit(0, 1, "Error", cause="worker 1 of rank 0 exited with code 3")]
            ),
            "0 of 1 ranks ready; UD 'train' reached terminal phase 'failed' "
            "(rank 0: exit_code=1 reason=Error, since worker 1 of rank 0 exited with code 3)",
        ),
        (
            BelowMinimumWorld("train", "cancelled", 0, 2, 300),
            "0 of 2 ranks ready; UD 'train' reached terminal phase 'cancelled' (no per-rank exits recorded)",
        ),
        (UDTerminalState("failed", 3, "train"), "run 'train' has ended (failed); it cannot be scaled to 3"),
        (
            BelowMinimumWorld("train", "starting", 1, 2, 0.5, EXITS, "2 ranks to be up", 4),
            "UD 'train': waited 0.5 s for 2 ranks to be up; phase 'starting', 1 ready of 2 required, target 4",
        ),
        (
            BelowMinimumWorld("train", "", 0, 2, 5),
            "UD 'train': waited 5 s for 2 ranks to be up; phase 'not yet observed', 0 ready of 2 required",
        ),
        (RateLimitError(1.5), "too many requests; try again in 1.5 s"),
    ],
    ids=lambda value: name_of(value) if isinstance(value, BasilicaError) else "",
)
def test_texts(error: BasilicaError, text: str) -> None:
    assert str(error) == text


def test_a_quota_says_what_the_limit_is() -> None:
    assert "current=6, requested=4, limit=8" in str(QuotaExceeded("ranks", 8, 6, 4))


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=name_of)
def test_every_error_has_its_message(error: BasilicaError) -> None:
    assert error.message in str(error)
    assert error.message


def test_what_callers_of_python_expect() -> None:
    assert issubclass(ValidationError, ValueError)
    assert issubclass(DeploymentNotFound, KeyError)
    assert issubclass(BelowMinimumWorld, DistributedError)
    assert issubclass(UDTerminalState, DistributedError)
    assert issubclass(WorldSizeOutOfBounds, DistributedError)
    assert issubclass(QuotaExceeded, DistributedError)


def test_only_what_may_work_later_is_retryable() -> None:
    later = {RateLimitError, NetworkError, StoreUnavailable, DiskFull, RuntimeUnavailable}
    assert {type(e) for e in ONE_OF_EACH if e.retryable} == later


def test_a_huge_value_is_not_repeated_whole() -> None:
    assert len(str(ValidationError("name", "x" * 10_000, "is too long"))) < 200
