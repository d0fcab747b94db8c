"""The activity of a rank in the run's keyspace: whole on its way there and back, whatever somebody else writes."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from basilica.core.seen import AnswerState, Leaving, SeenAgent, SeenAnswer, SeenProgress, SeenWorkerExit
from basilica.progress.activity import EXITS_SHOWN, Activity
from basilica.progress.published import VALUE_BYTES_MAX, PublishedActivity, encode, parse

EXIT = SeenWorkerExit(
    number=4,
    worker=1,
    torch_rank=3,
    pid=71,
    exit_code=137,
    reason="OOMKilled",
    at=1005.5,
    signal="SIGKILL",
    message="RuntimeError: half a sentence",
    traceback="Traceback …\nRuntimeError: half a sentence",
    log_tail=("step 7", "step 8"),
)
AGENT = SeenAgent(
    pid=70,
    nproc=2,
    round=3,
    group_rank=1,
    agents=2,
    world=4,
    first_torch_rank=2,
    pids=(71, 72),
    meeting_since=1000.0,
    executing_since=1001.0,
    exits=(EXIT,),
)
PROGRESS = SeenProgress(first_at=1002.0, first_step=0, at=1006.0, step=8, step_seconds=0.5)
ANSWER = SeenAnswer(state=AnswerState.READY, number=2, step=8, at=1006.5)
LEAVING = Leaving(kind="preemption", until=1040.0, reason="the platform takes the rank's place away")
WHOLE = PublishedActivity(attempt=1, activity=Activity(agent=AGENT, progress=PROGRESS, answer=ANSWER), leaving=LEAVING)


def value(**parts: Any) -> str:
    """The value of `WHOLE` with other parts."""
    return json.dumps({**json.loads(encode(WHOLE)), **parts})


def agent(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(WHOLE))["agent"]
    return {**found, **fields}


def exit_(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = agent()["exits"][0]
    return {**found, **fields}


@pytest.mark.parametrize("published", [WHOLE, PublishedActivity(attempt=0), replace(WHOLE, leaving=None)])
def test_it_comes_back_as_it_was(published: PublishedActivity) -> None:
    assert parse(encode(published)) == published


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "7",
        "[]",
        "{}",
        '{"attempt": -1}',
        '{"attempt": 1.5}',
        '{"attempt": "1"}',
        '{"attempt": true}',
        '{"attempt": 1e400}',
        f'{{"attempt": {"9" * 5000}}}',
        "[" * 20_000,
        '{"attempt": 1, "agent": "' + "x" * VALUE_BYTES_MAX + '"}',
        "\ud800",
    ],
    ids=repr,
)
def test_what_is_no_value_of_an_agent_is_none(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    "part",
    [
        {"agent": 7},
        {"agent": []},
        {"agent": {}},
        {"agent": agent(pid=-1)},
        {"agent": agent(pid=2**40)},
        {"agent": agent(pids=[1] * 2000)},
        {"agent": agent(pids=[[1]])},
        {"agent": agent(pids="71")},
        {"agent": agent(meeting_since=float("nan"))},
        {"agent": agent(executing_since=1e300)},
        {"agent": agent(executing_since=-5)},
        {"agent": agent(exits=[7])},
        {"agent": agent(exits=[exit_(exit_code="1")])},
        {"agent": agent(exits=[exit_(echo=0)])},
        {"agent": agent(exits=[exit_(at=float("inf"))])},
        {"agent": agent(exits=[exit_(log_tail="lines")])},
        {"agent": agent(exits=[exit_()] * (EXITS_SHOWN + 1))},
        {"progress": {"step": 1}},
        {"progress": {**asdict(PROGRESS), "step": 2**60}},
        {"progress": {**asdict(PROGRESS), "first_at": "soon"}},
        {"progress": "fast"},
        {"answer": {"state": "sleeping", "number": 1, "step": None, "at": 0}},
        {"answer": {"state": "ready", "number": -1, "step": None, "at": 0}},
        {"answer": {"state": ["ready"], "number": 1, "step": None, "at": 0}},
        {"leaving": {"kind": "holiday", "until": 1, "reason": ""}},
        {"leaving": {"kind": "drain", "until": None, "reason": ""}},
        {"leaving": {"kind": "drain", "until": 1, "reason": 7}},
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_a_part_that_no_agent_wrote_is_none_and_the_others_stay(part: dict[str, Any]) -> None:
    found = parse(value(**part))
    assert found is not None
    names = {"agent", "progress", "answer", "leaving"}
    parts = {name: getattr(found.activity, name, None) if name != "leaving" else found.leaving for name in names}
    assert {name for name in names if parts[name] is None} == part.keys()


def test_texts_are_cut_and_can_be_stored() -> None:
    found = parse(value(agent=agent(exits=[exit_(traceback="x" * 9000, message="\ud800", reason="r" * 900)])))
    assert found is not None
    assert found.activity.agent is not None
    [exit] = found.activity.agent.exits
    assert (len(exit.traceback), exit.message, len(exit.reason)) == (4000, "?", 64)


def test_exits_are_in_the_order_of_their_numbers_each_once() -> None:
    numbers = [5, 3, 5, 4]
    found = parse(value(agent=agent(exits=[exit_(number=number) for number in numbers])))
    assert found is not None
    assert found.activity.agent is not None
    assert [exit.number for exit in found.activity.agent.exits] == [3, 4, 5]


@pytest.mark.parametrize("letter", ["x", "€", "\1", "\U0001f600"])
def test_a_value_stays_small_and_keeps_what_failed_first_hand(letter: str) -> None:
    exits = tuple(
        replace(EXIT, number=n, echo=n != 3, traceback=letter * 1200, message=letter * 100, log_tail=(letter * 100,))
        for n in range(EXITS_SHOWN)
    )
    text = encode(replace(WHOLE, activity=replace(WHOLE.activity, agent=replace(AGENT, exits=exits))))
    assert len(text.encode()) < VALUE_BYTES_MAX
    found = parse(text)
    assert found is not None
    assert found.activity.agent is not None
    assert [exit.number for exit in found.activity.agent.exits] == list(range(EXITS_SHOWN))
    assert next(exit.number for exit in found.activity.agent.exits if exit.traceback) == 3
    assert not found.activity.agent.exits[0].traceback, "that was too much"
    assert (found.activity.answer, found.leaving) == (ANSWER, LEAVING)


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (WHOLE, True),
        (replace(WHOLE, activity=replace(WHOLE.activity, progress=replace(PROGRESS, step=9, at=1010.0))), True),
        (replace(WHOLE, activity=replace(WHOLE.activity, progress=replace(PROGRESS, step_seconds=None))), True),
        (replace(WHOLE, activity=replace(WHOLE.activity, progress=replace(PROGRESS, first_at=1009.0))), False),
        (replace(WHOLE, activity=replace(WHOLE.activity, progress=None)), False),
        (replace(WHOLE, activity=replace(WHOLE.activity, answer=replace(ANSWER, number=3))), False),
        (replace(WHOLE, activity=replace(WHOLE.activity, agent=replace(AGENT, round=4))), False),
        (replace(WHOLE, leaving=None), False),
        (replace(WHOLE, attempt=2), False),
    ],
)
def test_steps_alone_are_told_apart_from_what_is_decided_on(after: PublishedActivity, same: bool) -> None:
    assert after.is_same_but_for_steps(WHOLE) is same
    assert not after.is_same_but_for_steps(None)
