"""What is written into torchelastic's state, from every state that it can be in."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basilica.rendezvous.elastic import (
    CONFIRM_S,
    FROZEN_TTL_S,
    NOTICE_S,
    LookAgain,
    Open,
    Swap,
    UnknownShape,
    decide,
    first_value,
    parse_round,
    parse_target,
    without_the_gone,
)
from tests.support.exploring import examples

LEASES = [f"/torchelastic/p2p/run_r/rdzv/v_1/rank_{n}" for n in range(9)]

# As torch 2.13 wrote them; `tests/rendezvous/test_driver.py` has it write them again.
SETUP = '{"status": "setup"}'
JOINABLE = '{"status": "joinable", "version": "1", "participants": [0, 1]}'
FROZEN = '{"status": "frozen", "version": "1", "participants": [0, 1], "keep_alives": []}'
FINAL = (
    '{"status": "final", "version": "1", "participants": [0, 1], "keep_alives": '
    '["/torchelastic/p2p/run_r/rdzv/v_1/rank_0", "/torchelastic/p2p/run_r/rdzv/v_1/rank_1"], "num_workers_waiting": 0}'
)
CLOSED = FINAL.replace('"final"', '"closed"')


def final(participants: int, waiting: int = 0, basilica: dict[str, int] | None = None) -> str:
    fields: dict[str, Any] = {"status": "final", "version": "1", "participants": list(range(participants))}
    fields |= {"keep_alives": LEASES[:participants], "num_workers_waiting": waiting}
    return json.dumps(fields if basilica is None else fields | {"basilica": basilica})


def step(text: str, target: int, pending_for: float = 60.0) -> Any:
    return decide(parse_round(text), target, pending_for)


def written(text: str, target: int) -> dict[str, Any]:
    swap = step(text, target)
    assert isinstance(swap, Swap)
    fields: dict[str, Any] = json.loads(swap.value)
    return fields


def test_a_round_is_frozen_as_soon_as_all_that_are_wanted_have_joined() -> None:
    assert step(JOINABLE, 3) is None
    frozen = step(JOINABLE, 2)
    assert json.loads(frozen.value) == json.loads(FROZEN)
    assert frozen.ttl == FROZEN_TTL_S
    assert written(JOINABLE, 1)["status"] == "frozen"  # one too many is in: it is not waited for others


@pytest.mark.parametrize("text", [SETUP, FINAL])
def test_what_goes_its_way_is_left_alone(text: str) -> None:
    assert step(text, 2) is None


def test_a_round_that_a_member_does_not_confirm_gives_way_to_the_next() -> None:
    assert step(FROZEN, 2, pending_for=1.0) == LookAgain(CONFIRM_S - 1.0)
    assert step(FROZEN, 2, pending_for=CONFIRM_S) == Open()
    one = FROZEN.replace('"keep_alives": []', f'"keep_alives": ["{LEASES[1]}"]')
    assert parse_round(one).pending != parse_round(FROZEN).pending  # time begins anew with every one who confirms


def test_newcomers_are_waited_for_while_the_others_train() -> None:
    assert step(FINAL, 4) is None
    assert step(final(2, waiting=1), 4) is None
    assert step(final(2, waiting=3), 4) is None


def test_the_next_round_opens_once_all_that_are_wanted_wait() -> None:
    assert step(final(2, waiting=4), 4) == Open()
    assert step(final(2, waiting=2), 2) == Open()  # one was killed and came back
    assert step(final(2, waiting=4), 4, pending_for=0) == Open()  # nobody is left who could have missed it


def test_a_round_that_is_too_large_is_told_to_meet_again_once() -> None:
    nudged = step(final(3), 2)
    assert nudged.ttl is None
    fields = json.loads(nudged.value)
    assert fields == json.loads(final(3, waiting=1)) | {"basilica": {"nudged": 1}}
    assert step(nudged.value, 2) is None


def test_our_own_nudge_is_not_counted_as_an_agent() -> None:
    assert step(final(3, 2, {"nudged": 1}), 2) is None
    assert step(final(3, 3, {"nudged": 1}), 2) == Open()


def test_a_smaller_round_opens_only_when_the_slowest_has_had_time_to_notice() -> None:
    assert step(final(3, waiting=2), 2, pending_for=0.1) == LookAgain(NOTICE_S - 0.1)
    assert step(final(3, waiting=2), 2, pending_for=NOTICE_S) == Open()


def test_surplus_agents_that_are_not_stopped_do_not_make_the_others_meet_for_ever() -> None:
    assert step(final(3, basilica={"target": 2}), 2) is None
    assert written(final(3, basilica={"target": 2}), 1)["basilica"] == {"target": 2, "nudged": 1}


def test_what_was_shut_while_the_run_goes_on_is_opened_again() -> None:
    assert written(CLOSED, 2) == json.loads(FINAL)
    for text in (SETUP, JOINABLE, FROZEN):
        shut = json.dumps(json.loads(text) | {"status": "closed"})
        assert step(shut, 2) == Open()
        assert step(shut, 0) is None  # the run does not go on


def test_those_who_are_gone_are_taken_out_of_a_round_that_has_members_left() -> None:
    found = parse_round(final(3, waiting=1))
    swap = without_the_gone(found, [LEASES[0], LEASES[2], "/torchelastic/p2p/run_r/rdzv/v_1/kv"])
    assert swap is not None
    assert json.loads(swap.value) == json.loads(final(3, waiting=1)) | {"keep_alives": [LEASES[0], LEASES[2]]}
    assert swap.ttl is None
    assert without_the_gone(parse_round(swap.value), [LEASES[0], LEASES[2]]) is None


@pytest.mark.parametrize("text", [SETUP, JOINABLE, FROZEN, FINAL, CLOSED])
def test_a_round_whose_members_are_all_there_or_all_gone_is_left_to_the_agents(text: str) -> None:
    assert without_the_gone(parse_round(text), []) is None
    assert without_the_gone(parse_round(text), LEASES) is None


def test_a_round_ends_when_somebody_waits_or_was_made_to_seem_to() -> None:
    assert [parse_round(text).ends for text in (SETUP, JOINABLE, FROZEN, FINAL, CLOSED)] == [False] * 5
    assert parse_round(final(2, waiting=1)).ends
    assert parse_round(final(2, 1, {"nudged": 1})).ends


def test_a_fresh_round_is_what_torch_makes_and_says_for_whom() -> None:
    assert json.loads(first_value(7, 3)) == {
        "status": "joinable",
        "version": "7",
        "participants": [],
        "basilica": {"target": 3},
    }
    assert parse_round(first_value(7, 3)).formed_for == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "null",
        "[]",
        "[" * 100_000,
        "{}",
        '{"status": 1}',
        '{"status": "thawed"}',
        JOINABLE.replace('"1"', "1"),
        JOINABLE.replace('"1"', '"one"'),
        JOINABLE.replace('"1"', '"²"'),
        JOINABLE.replace("[0, 1]", "2"),
        JOINABLE.replace("[0, 1]", '{"0": 1}'),
        JOINABLE.replace("[0, 1]", "[1, 0]"),
        JOINABLE.replace("[0, 1]", '["a", "b"]'),
        JOINABLE.replace("}", ', "redundancy": []}'),
        FROZEN.replace('"keep_alives": []', '"keep_alives": null'),
        FROZEN.replace('"keep_alives": []', '"keep_alives": [[]]'),
        FINAL.replace(": 0}", ": -1}"),
        FINAL.replace(": 0}", ": true}"),
        FINAL.replace(": 0}", ": 0.5}"),
        FINAL.replace(": 0}", ': 0, "basilica": {"nudged": 1}}'),
        FINAL.replace(": 0}", ': 2, "basilica": {"nudged": 2}}'),
        FINAL.replace(": 0}", ': 0, "basilica": 7}'),
        FINAL.replace(": 0}", ': 0, "basilica": {"other": 1}}'),
        FINAL.replace('"num_workers_waiting": 0', '"waiting": 0'),
    ],
)
def test_an_unknown_shape_is_refused(text: str) -> None:
    with pytest.raises(UnknownShape):
        parse_round(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_whatever_json_is_there_nothing_else_than_a_refusal_happens(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"status": "final", "participants": value, "version": value})):
        with pytest.raises(UnknownShape):
            parse_round(text)


@pytest.mark.parametrize(("text", "target"), [('{"target": 3}', 3), ('{"target": 0, "more": 1}', 0)])
def test_the_target_is_read(text: str, target: int) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"target": "3"}', '{"target": -1}', '{"target": true}', "null"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UnknownShape):
        parse_target(text)


# Agents as torch's source has them, in steps of one compare-and-swap each, in any order.


@dataclass
class ModelAgent:
    """`place`: out, joined, confirmed, waiting or training; in the round `version` as number `seat` of `world`."""

    place: str = "out"
    version: str = ""
    seat: int = 0
    world: int = 0
    failures: int = 0


@dataclass
class Model:
    """The keyspace, the agents, and us. `patience`: whether time-outs may help (last call, TTLs)."""

    smallest: int
    largest: int
    target: int
    random: random.Random
    value: str | None = None
    counter: int = 0
    agents: list[ModelAgent] = field(default_factory=list)
    leases: set[tuple[str, int]] = field(default_factory=set)

    def drive(self, *, later: bool = False) -> None:
        """At once, after every change: that is what it is for. `later`: and when nobody confirmed for long."""
        while self.value is not None:
            found = parse_round(self.value)
            alive = [str(seat) for version, seat in self.leases if version == found.fields.get("version")]
            pending_for = 60.0 if later or found.status == "final" else 0.0
            match decide(found, self.target, pending_for) or without_the_gone(found, alive):
                case Swap(value, _):
                    assert value != self.value
                    self.value = value
                case Open():
                    self.counter += 1
                    self.value = first_value(self.counter, self.target)
                case _:
                    return

    def put(self, fields: dict[str, Any]) -> None:
        self.value = json.dumps(fields)
        self.drive()

    def turn(self, agent: ModelAgent) -> None:
        state: dict[str, Any] = {} if self.value is None else json.loads(self.value)
        status, same = state.get("status"), state.get("version") == agent.version
        match agent.place, status:
            case "out", None:
                self.counter += 1
                self.put({"status": "joinable", "version": str(self.counter), "participants": []})
            case "out", "closed":
                raise AssertionError("RendezvousClosedError")
            case "out", "joinable":
                agent.place, agent.version, agent.seat = "joined", state["version"], len(state["participants"])
                state["participants"].append(agent.seat)
                if len(state["participants"]) == self.largest:
                    state |= {"status": "frozen", "keep_alives": []}
                self.put(state)
            case "out", "final":
                agent.place, agent.version = "waiting", state["version"]
                self.put(state | {"num_workers_waiting": state["num_workers_waiting"] + 1})
            case "joined", "frozen" if same:
                agent.place = "confirmed"
                self.leases.add((agent.version, agent.seat))
                state["keep_alives"].append(str(agent.seat))
                if len(state["keep_alives"]) == len(state["participants"]):
                    state |= {"status": "final", "num_workers_waiting": 0}
                self.put(state)
            case "confirmed", "final" if same:
                agent.place, agent.world = "training", len(state["participants"])
            case "training", "final" if state["num_workers_waiting"] > 0:
                agent.place = "out"
            case "training", _ if self.lost_a_peer(agent):
                agent.place, agent.failures = "out", agent.failures + 1
            case "joined", "joinable" if same:
                pass
            case "confirmed", "frozen" if same:
                pass
            case "waiting", "final" if same:
                if not all((agent.version, int(seat)) in self.leases for seat in state["keep_alives"]):
                    self.value, agent.place = None, "out"
            case (("joined" | "confirmed" | "waiting"), _):
                agent.place = "out"
            case _:
                pass

    def lost_a_peer(self, agent: ModelAgent) -> bool:
        """One of its world is no longer in it: its processes meet nobody there, or lose the connection."""
        seats = {a.seat for a in self.agents if a.version == agent.version and a.place in ("training", "confirmed")}
        return seats != set(range(agent.world))

    def settle(self, *, patience: bool) -> bool:
        for _ in range(400):
            for agent in self.random.sample(self.agents, len(self.agents)):
                self.turn(agent)
            if self.at_rest():
                return True
            if patience:
                self.time_passes()
        return False

    def at_rest(self) -> bool:
        state = json.loads(self.value or "{}")
        everyone = all(a.place == "training" and a.version == state.get("version") for a in self.agents)
        return everyone and len(state.get("participants", ())) == len(self.agents)

    def time_passes(self) -> None:
        """Everything that can expire does, and a last call ends."""
        alive = {(a.version, a.seat) for a in self.agents if a.place in ("confirmed", "training")}
        self.leases &= alive
        state = json.loads(self.value or "{}")
        members = sum(a.version == state.get("version") and a.place in ("joined", "confirmed") for a in self.agents)
        if state.get("status") == "frozen" and members < len(state["participants"]):
            self.drive(later=True)
        elif state.get("status") == "joinable" and len(state["participants"]) >= self.smallest:
            self.put(state | {"status": "frozen", "keep_alives": []})


def settled(target: int, largest: int, seed: int) -> Model:
    model = Model(2, largest, target, random.Random(seed))
    model.agents = [ModelAgent() for _ in range(target)]
    assert model.settle(patience=False)
    return model


sizes = st.integers(2, 6)
seeds = st.integers(0, 1 << 32)


@given(sizes, sizes, seeds)
def test_a_resize_needs_no_time_out_in_whatever_order_agents_move(before: int, after: int, seed: int) -> None:
    model = settled(before, 6, seed)
    model.target = after
    model.drive()
    del model.agents[after:]  # they get SIGTERM when the target has been written
    model.agents += [ModelAgent() for _ in range(after - before)]
    assert model.settle(patience=False)
    if after < before:
        assert all(agent.failures == 0 for agent in model.agents)


@given(sizes, st.data(), seeds)
def test_killed_agents_that_come_back_need_no_time_out(target: int, data: st.DataObject, seed: int) -> None:
    model = settled(target, 6, seed)
    for index in data.draw(st.sets(st.integers(0, target - 1), min_size=1)):
        model.agents[index] = ModelAgent()
    assert model.settle(patience=False)


@given(sizes, seeds)
def test_an_agent_that_ended_shuts_nobody_out(target: int, seed: int) -> None:
    model = settled(target, 6, seed)
    state = json.loads(model.value or "")
    model.agents[0] = ModelAgent()  # it failed for good, and its successor comes
    model.put(state | {"status": "closed"})
    assert model.settle(patience=False)


@settings(max_examples=examples(300))
@given(
    sizes, st.lists(st.tuples(st.sampled_from(["turn", "kill", "scale", "shut", "time"]), st.integers(0, 99))), seeds
)
def test_after_any_trouble_the_world_is_as_wanted(target: int, trouble: list[tuple[str, int]], seed: int) -> None:
    model = Model(2, 6, target, random.Random(seed))
    model.agents = [ModelAgent() for _ in range(target)]
    for what, number in trouble:
        index = number % len(model.agents)
        match what:
            case "turn":
                model.turn(model.agents[index])
            case "kill":
                model.agents[index] = ModelAgent()
            case "scale":
                model.target = 2 + number % 5
                model.drive()
                del model.agents[model.target :]
                model.agents += [ModelAgent() for _ in range(model.target - len(model.agents))]
            case "shut":
                if model.value is not None:
                    model.put(json.loads(model.value) | {"status": "closed"})
            case _:
                model.time_passes()
    assert model.settle(patience=True)
    assert model.target == len(model.agents)
