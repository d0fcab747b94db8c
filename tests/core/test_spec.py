"""A spec that cannot work is refused when it is made, with the field and the value in the sentence."""

import math
from typing import Any

import pytest

from basilica.core.errors import ValidationError, WorldSizeOutOfBounds
from basilica.core.spec import (
    ARG_BYTES_MAX,
    ENV_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    SECONDS_MAX,
    DeploymentSpec,
    Exec,
    Gpus,
    Resources,
    Shell,
    Wanted,
)
from basilica.core.world import WORLD_LIMIT, WorldSize


def make(**settings: Any) -> DeploymentSpec:
    return DeploymentSpec(**{"name": "fine", "program": Exec(("train",)), "world": WorldSize(1, 2, 4), **settings})


class TestWorldSize:
    @pytest.mark.parametrize(
        ("size", "requested", "low", "high"),
        [
            ((0, 1, 1), 0, 1, 1),
            ((-1, 1, 1), -1, 1, 1),
            ((2, 1, 3), 1, 2, 3),
            ((1, 4, 3), 4, 1, 3),
            ((3, 3, 2), 3, 1, 2),
            ((1, 1, 0), 1, 1, 0),
            ((1, 1, WORLD_LIMIT + 1), WORLD_LIMIT + 1, 1, WORLD_LIMIT),
        ],
    )
    def test_out_of_bounds(self, size: tuple[int, int, int], requested: int, low: int, high: int) -> None:
        with pytest.raises(WorldSizeOutOfBounds) as caught:
            WorldSize(*size)
        assert (caught.value.requested, caught.value.min, caught.value.max) == (requested, low, high)

    @pytest.mark.parametrize("size", [(1, 1, 1), (1, 2, 3), (3, 3, 3), (1, 1, WORLD_LIMIT)])
    def test_within_bounds(self, size: tuple[int, int, int]) -> None:
        assert WorldSize(*size).max == size[2]

    @pytest.mark.parametrize("target", [0, 1, 5, -3])
    def test_scaling_out_of_bounds_is_refused(self, target: int) -> None:
        with pytest.raises(WorldSizeOutOfBounds) as caught:
            WorldSize(2, 3, 4).scaled(target)
        assert (caught.value.requested, caught.value.min, caught.value.max) == (target, 2, 4)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "Train"}, "name", "'Train'"),
    ({"program": Shell("  ")}, "program.script", "'  '"),
    ({"program": Shell("x\0y")}, "program.script", "NUL"),
    ({"program": Shell("#" * SCRIPT_BYTES_MAX)}, "program.script", f"{SCRIPT_BYTES_MAX} bytes"),
    ({"program": Shell("train", ("a\0",))}, "program.args", "NUL"),
    ({"program": Exec(())}, "program.argv", "[]"),
    ({"program": Exec(("",))}, "program.argv", "['']"),
    ({"program": Exec(("train", "\ud800"))}, "program.argv", "not valid Unicode"),
    ({"program": Exec(("train", "x" * ARG_BYTES_MAX))}, "program.argv", f"{ARG_BYTES_MAX} bytes"),
    ({"env": {"1A": "x"}}, "env", "'1A'"),
    ({"env": {"": "x"}}, "env", "''"),
    ({"env": {"A=B": "x"}}, "env", "'A=B'"),
    ({"env": {"A\n": "x"}}, "env", "'A\\n'"),
    ({"nccl_env": {"A B": "x"}}, "nccl_env", "'A B'"),
    ({"port": 0}, "port", "0"),
    ({"port": 70000}, "port", "70000"),
    ({"rendezvous_port": 70000}, "rendezvous_port", "70000"),
    ({"max_restarts": -1}, "max_restarts", "-1"),
    ({"grace_seconds": -0.5}, "grace_seconds", "-0.5"),
    ({"grace_seconds": math.nan}, "grace_seconds", "nan"),
    ({"ttl_seconds": -1.0}, "ttl_seconds", "-1"),
    ({"ttl_seconds": SECONDS_MAX + 1}, "ttl_seconds", "315360001"),
    ({"deadline_seconds": math.inf}, "deadline_seconds", "inf"),
    ({"start_deadline_seconds": -2.0}, "start_deadline_seconds", "-2"),
    ({"resources": Resources(cpu=0.0)}, "resources.cpu", "0"),
    ({"resources": Resources(memory_bytes=5)}, "resources.memory_bytes", "5"),
    ({"resources": Resources(gpus=Gpus(-1))}, "resources.gpus.count", "-1"),
    ({"resources": Resources(gpus=Gpus(1, min_memory_gb=0))}, "resources.gpus.min_memory_gb", "0"),
    ({"workdir": "relative/path"}, "workdir", "'relative/path'"),
    ({"workdir": "/a\0b"}, "workdir", "NUL"),
]


@pytest.mark.parametrize(("settings", "field", "shown"), REFUSED, ids=[f"{f}-{s[:20]}" for _, f, s in REFUSED])
def test_each_refusal_names_the_field_and_the_value(settings: dict[str, Any], field: str, shown: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**settings)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("where", ["env", "secrets", "nccl_env"])
@pytest.mark.parametrize("value", ["hunter2\0", "hunter2\ud800", "hunter2" * ARG_BYTES_MAX])
def test_values_of_variables_are_never_echoed(where: str, value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**{where: {"TOKEN": value}})
    assert "TOKEN" in str(caught.value)
    assert "hunter2" not in f"{caught.value} {caught.value!r} {caught.value.args}"


def test_all_variables_together_have_a_limit() -> None:
    with pytest.raises(ValidationError, match=f"together at most {ENV_BYTES_MAX} bytes"):
        make(env={f"V{n}": "x" * 1000 for n in range(2000)})


def test_secrets_are_not_in_the_repr() -> None:
    assert "hunter2" not in repr(make(secrets={"TOKEN": "hunter2"}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"program": Shell("echo $1", ("a b", ""))},
        {"env": {"A": "", "_b.c-d": "ü\n"}},
        {"ttl_seconds": 0.0, "deadline_seconds": None, "start_deadline_seconds": 0.5},
        {"workdir": "/somewhere", "port": 65535, "rendezvous_port": 29400, "grace_seconds": 0},
        {"resources": Resources(0.001, 1 << 20, Gpus(8, ("H200",), 80))},
    ],
)
def test_what_can_work_is_accepted(settings: dict[str, Any]) -> None:
    make(**settings)


def test_every_change_is_a_generation() -> None:
    spec = make()
    assert spec.scaled(4).world == WorldSize(1, 4, 4)
    assert [spec.scaled(4).generation, spec.restarted().generation, spec.ended_by(Wanted.CANCEL).generation] == [2] * 3
    assert spec.restarted().gang == 1


def test_what_is_wanted_only_moves_downwards() -> None:
    deleted = make().ended_by(Wanted.CANCEL).ended_by(Wanted.DELETE)
    assert (deleted.wanted, deleted.generation) == (Wanted.DELETE, 3)
    assert deleted.ended_by(Wanted.CANCEL) is deleted
    assert deleted.ended_by(Wanted.DELETE) is deleted
    assert make().ended_by(Wanted.RUN).generation == 1


def test_asking_for_a_particular_gpu_is_demanding() -> None:
    assert not Gpus(4).demanding
    assert Gpus(4, models=("H200",)).demanding
    assert Gpus(4, min_memory_gb=80).demanding


def test_defaults_that_the_contract_names() -> None:
    spec = make()
    assert (spec.grace_seconds, spec.max_restarts, spec.ttl_seconds, spec.bench) == (10, 0, None, None)
