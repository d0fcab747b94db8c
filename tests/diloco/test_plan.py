"""The planner: what it counts is what rounds really cost, and what it chooses reaches the goal."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.diloco import ObjectStoreAllReduce
from basilica.diloco.fragments import Options
from basilica.diloco.measure import measure
from basilica.diloco.plan import (
    USUAL_SYNC,
    WIRE_BYTES,
    Prices,
    Question,
    StoreSpeed,
    bytes_of_round,
    enough_fragments,
    make_plan,
    plan_for,
    round_seconds,
    utilisation,
)
from basilica.diloco.stores import open_store
from basilica.diloco.stores.cloud import LARGEST_CREATED
from tests.diloco.gang import fresh_uri, gang

EXAMPLE = Question(params=1.3e9, replicas=8, link=25e6, step_seconds=0.9)


def test_a_fast_link_needs_nothing_but_a_short_interval() -> None:
    plan = make_plan(Question(params=1e6, replicas=4, link=1e9, step_seconds=0.5))
    assert (plan.sync_every, plan.fragments, plan.wire) == (40, 1, "fp32")
    assert plan.reaches_goal


def test_a_slow_link_gets_fragments_and_small_numbers() -> None:
    plan = make_plan(EXAMPLE)
    assert plan.reaches_goal
    assert plan.fragments == 4
    assert plan.wire == "int4"
    assert plan.delay * EXAMPLE.step_seconds >= plan.round_seconds
    assert plan.delay < plan.sync_every // plan.fragments
    assert plan.less_communication == pytest.approx(
        plan.sync_every * 4 * 4 * 7 / 8 / (WIRE_BYTES["int4"] * (1 + 2 * 7 / 8))
    )


def test_a_large_model_on_a_fast_link_is_sent_in_parts_that_a_store_takes() -> None:
    plan = make_plan(Question(params=7e10, replicas=4, link=12.5e9, step_seconds=20))
    assert plan.reaches_goal
    assert (plan.wire, plan.fragments) == ("bf16", 32)
    part = 7e10 * 2 * 3 / 4
    assert part / 32 <= LARGEST_CREATED < part / 16


def test_few_rounds_are_told() -> None:
    for steps, few in ((31 * 160, True), (32 * 160, False)):
        plan = make_plan(replace(EXAMPLE, steps=steps))
        assert (plan.sync_every, plan.rounds, plan.few_rounds) == (160, steps // 160, few)
    assert not make_plan(EXAMPLE).few_rounds


def test_what_is_out_of_reach_is_said() -> None:
    plan = make_plan(Question(params=7e10, replicas=4, link=1e6, step_seconds=1))
    assert not plan.reaches_goal
    assert plan.wire == "int4"


def test_the_arithmetic() -> None:
    question = Question(params=1e9, replicas=4, link=1e8, step_seconds=1, store=StoreSpeed(), prices=Prices())
    assert bytes_of_round(4e9, 4) == (4e9, 6e9)
    assert round_seconds(question, 4e9) == pytest.approx(40 + 60 + 15 * (0.05 + 0.03 + 0.05) / 3)
    assert utilisation(100, 1.0, 25.0) == 0.8
    plan = plan_for(question, sync_every=100, fragments=1, wire="fp32")
    assert plan.utilisation == pytest.approx(100 / (100 + plan.round_seconds))
    assert plan.less_communication == pytest.approx(100 * 4 * 4e9 * 3 / 4 / 10e9)
    assert plan.intervals_per_day == pytest.approx(86400 * plan.utilisation / 100)
    egress = plan.traffic.bytes_down * plan.intervals_per_day * 4
    assert plan.egress_dollars_per_day == pytest.approx(egress / 1e9 * 0.09)


@given(
    params=st.floats(1e3, 1e12),
    replicas=st.integers(2, 256),
    link=st.floats(1e4, 1e11),
    step_seconds=st.floats(1e-3, 100),
)
def test_every_plan_makes_sense(params: float, replicas: int, link: float, step_seconds: float) -> None:
    question = Question(params=params, replicas=replicas, link=link, step_seconds=step_seconds)
    plan = make_plan(question)
    assert 0 < plan.utilisation <= 1
    assert plan.sync_every % plan.fragments == 0
    assert 0 <= plan.delay < max(2, plan.sync_every // plan.fragments)
    assert plan.checkpoint_every >= 1
    assert not plan.reaches_goal or plan.utilisation >= question.goal
    part = params * WIRE_BYTES[plan.wire] * (replicas - 1) / replicas
    assert part / plan.fragments <= LARGEST_CREATED
    simple = plan_for(question, sync_every=USUAL_SYNC, fragments=1, wire="fp32")
    assert plan.reaches_goal or not simple.reaches_goal or enough_fragments(question, "fp32") > 1
    Options(sync_every=plan.sync_every, fragments=plan.fragments, delay=plan.delay, mix=plan.mix)  # it is accepted
    for value in (plan.requests_per_day, plan.egress_dollars_per_day, plan.bytes_per_day):
        assert 0 <= value < math.inf


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("params", 0, "params must be a number of more than 0"),
        ("link", math.inf, "link must be"),
        ("replicas", 1, "replicas must be at least 2.* nobody to exchange with"),
        ("steps", 0, "steps must be at least 1"),
        ("goal", 1.0, "between 0 and 1"),
    ],
)
def test_a_question_without_meaning_is_refused(field: str, value: float, problem: str) -> None:
    known = {"params": 1e9, "replicas": 8, "link": 1e6, "step_seconds": 1.0, field: value}
    with pytest.raises(ValueError, match=problem):
        Question(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", list(WIRE_BYTES))
@pytest.mark.parametrize("replicas", [2, 4])
def test_the_bytes_are_those_of_real_rounds(wire: str, replicas: int) -> None:
    count = 1 << 20

    def replica(allreduce: ObjectStoreAllReduce) -> tuple[int, int, int, int]:
        array = np.random.default_rng(allreduce.rank).normal(size=count).astype(np.float32)
        allreduce.allreduce([array])
        stats = allreduce.history[-1]
        return stats.bytes_up, stats.bytes_down, stats.requests["put"], stats.requests["get"]

    found = gang(replicas, replica, wire=wire)
    up, down = bytes_of_round(count * WIRE_BYTES[wire], replicas)
    question = Question(params=count, replicas=replicas, link=1e9, step_seconds=1)
    planned = plan_for(question, sync_every=100, fragments=1, wire=wire).traffic
    for real_up, real_down, puts, gets in found:
        assert real_up == pytest.approx(up, rel=0.03)
        assert real_down == pytest.approx(down, rel=0.06)
        assert puts <= planned.puts
        assert gets <= 2 * planned.gets


def test_a_store_is_measured_and_left_as_it_was() -> None:
    store = open_store(fresh_uri())
    found = measure(store, object_bytes=1 << 16, objects=2)
    assert store.list("") == ()
    for value in (found.put_seconds, found.get_seconds, found.list_seconds):
        assert 0 < value < 10
    assert found.up_bytes_per_second > 1e3
    assert found.down_bytes_per_second > 1e3
