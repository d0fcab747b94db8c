"""When a rank counts as lost with its node: every rule alone, and the two stories that taught them."""

from typing import Any

import pytest

from basilica.core.fencing import FenceTimes
from basilica.rendezvous.presence import Heard
from basilica.runtimes.kubernetes.node_evidence import AWAY_COUNTS_S, Evidence, Heartbeats, NodeFacts, Nodes

TIMES = FenceTimes()
PATIENCE = 30.0
LOST = TIMES.lost_after


def node(name: str, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"basilica.dev/provider": "acme"}},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def evidence(nodes: Nodes, now: float, **silences: float | None) -> Evidence:
    return Evidence(
        now=now,
        nodes=nodes.facts,
        counted_from=nodes.counted_from,
        patience=PATIENCE,
        lost_after=LOST,
        silences=silences,
    )


def lost(nodes: Nodes, now: float, silence: float | None = LOST) -> bool:
    return evidence(nodes, now, pod=silence).is_lost("pod", "a")


def cluster(**ready: str) -> Nodes:
    nodes = Nodes()
    for name, status in ready.items():
        nodes.update(node(name, status), 0.0)
    return nodes


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_a_node_that_is_not_ready_counts_from_when_we_noticed_it(status: str) -> None:
    nodes = cluster(a="True", b="True")
    nodes.update(node("a", status), 100.0)
    nodes.update(node("a", status), 120.0)
    assert (lost(nodes, 129.9), lost(nodes, 130.0)) == (False, True)
    nodes.update(node("a"), 140.0)
    assert not lost(nodes, 1000.0)


@pytest.mark.parametrize(("silence", "is_lost"), [(0.0, False), (LOST - 0.1, False), (None, False), (LOST, True)])
def test_nobody_is_lost_whose_agent_may_still_run_its_rank(silence: float | None, is_lost: bool) -> None:
    nodes = cluster(a="Unknown", b="True")
    assert lost(nodes, 10_000.0, silence) == is_lost


def test_nodes_that_went_unready_together_are_no_evidence() -> None:
    nodes = cluster(a="True", b="True", c="True")
    for name, moment in (("a", 100.0), ("b", 101.0), ("c", 103.0)):
        nodes.update(node(name, "Unknown"), moment)
    assert not lost(nodes, 10_000.0)
    nodes.update(node("b"), 200.0)  # they come back one after the other
    assert (lost(nodes, 229.9), lost(nodes, 230.0)) == (False, True)
    nodes.update(node("a"), 215.0)
    assert not lost(nodes, 10_000.0)


def test_a_cluster_of_one_node_has_nowhere_to_go() -> None:
    assert not lost(cluster(a="Unknown"), 10_000.0)


def test_a_node_that_is_added_while_all_are_unready_does_not_condemn_the_others_at_once() -> None:
    nodes = cluster(a="Unknown", b="Unknown")
    nodes.update(node("new"), 500.0)
    assert (lost(nodes, 529.9), lost(nodes, 530.0)) == (False, True)


@pytest.mark.parametrize(
    ("away_for", "counted_from"), [(AWAY_COUNTS_S - 0.1, 0.0), (AWAY_COUNTS_S, 300.0), (60.0, 300.0)]
)
def test_silence_counts_only_from_when_the_api_server_could_be_asked_again(
    away_for: float, counted_from: float
) -> None:
    nodes = cluster(a="Unknown", b="True")
    nodes.api_returned(away_for, 300.0)
    due = max(0.0, counted_from) + PATIENCE
    assert (lost(nodes, due - 0.1), lost(nodes, due)) == (False, True)


def test_a_node_that_is_not_in_the_cluster_speaks_for_no_pod() -> None:
    found = evidence(cluster(a="True"), 10.0)
    assert (found.is_ready("a"), found.is_ready("gone")) == (True, False)


def test_when_to_look_again() -> None:
    nodes = cluster(a="True", b="True")
    nodes.update(node("a", "Unknown"), 100.0)
    assert evidence(nodes, 100.0, pod=50.0).lost_in("pod", "a") == pytest.approx(LOST - 50.0)
    assert evidence(nodes, 100.0, pod=LOST - 5.0).lost_in("pod", "a") == pytest.approx(PATIENCE)
    for silence in (0.0, None):  # the rendezvous will say so
        assert evidence(nodes, 100.0, pod=silence).lost_in("pod", "a") is None
    assert evidence(nodes, 500.0, pod=LOST).lost_in("pod", "a") is None
    assert evidence(nodes, 100.0, pod=50.0).lost_in("pod", "b") is None
    assert Evidence(
        now=100.0, nodes={"a": NodeFacts(unready_since=0.0), "b": NodeFacts()}, silences={"pod": 5.0}, settles_in=7.0
    ).lost_in("pod", "a") == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("silence", "settles_in", "left"),
    [(None, 0.0, None), (0.0, 0.0, None), (LOST, 0.0, None), (50.0, 0.0, LOST - 50.0), (5.0, 7.0, 7.0)],
)
def test_when_an_agent_will_have_stopped_its_rank(silence: float | None, settles_in: float, left: float | None) -> None:
    assert Evidence(silences={"pod": silence}, settles_in=settles_in).silent_in("pod") == left


# ---- what the rendezvous says ----------------------------------------------------------------------------------------


def test_an_agent_is_as_silent_as_the_rendezvous_says() -> None:
    heartbeats = Heartbeats(TIMES)
    assert heartbeats.silence("a", 0.0) is None
    heartbeats.reload({"a": Heard(), "b": Heard()}, 10.0)
    assert heartbeats.silence("a", 1000.0) == 0.0
    heartbeats.update("a", Heard(silent=12.5), 100.0)
    assert (heartbeats.silence("a", 100.0), heartbeats.silence("a", 110.0)) == (12.5, 22.5)
    assert (heartbeats.missed("a", 100.0), heartbeats.missed("b", 100.0)) == (12.5, None)
    heartbeats.reload({"a": Heard(silent=12.5), "b": Heard()}, 120.0)  # read again: no younger for that
    assert heartbeats.silence("a", 130.0) == 42.5
    heartbeats.update("a", Heard(gap=60.0), 150.0)
    assert heartbeats.silence("a", 150.0) == 0.0


def test_nothing_is_known_while_the_rendezvous_cannot_be_asked() -> None:
    heartbeats = Heartbeats(TIMES)
    heartbeats.reload({"a": Heard(silent=80.0)}, 10.0)
    heartbeats.pause(20.0)
    assert heartbeats.silence("a", 1000.0) is None


def test_an_agent_of_which_nobody_ever_heard_counts_from_when_we_could_ask() -> None:
    """And is shown only where others are heard from: an older agent sends no heartbeats."""
    heartbeats = Heartbeats(TIMES)
    heartbeats.reload({}, 100.0)
    assert heartbeats.silence("a", 150.0) == 50.0
    assert heartbeats.missed("a", 150.0) is None
    heartbeats.update("b", Heard(), 150.0)
    assert heartbeats.missed("a", 150.0) == 50.0


def test_a_new_rendezvous_counts_from_the_last_word_of_the_old_one() -> None:
    heartbeats = Heartbeats(TIMES)  # of an operator that is new as well
    heartbeats.reload({}, 165.0)
    heartbeats.update("b", Heard(gap=66.0), 166.0)  # it had word until 100
    heartbeats.update("c", Heard(gap=63.0), 167.0)  # and this one until 104
    assert heartbeats.silence("a", 170.0) == 5.0, "it may only not have been heard from yet"
    settled = 165.0 + heartbeats.settles_in(165.0)
    assert heartbeats.silence("a", settled) == settled - 104.0


def test_a_rendezvous_that_we_followed_longer_than_others_did_counts_from_then() -> None:
    heartbeats = Heartbeats(TIMES)
    heartbeats.reload({"a": Heard(), "b": Heard(silent=12.5)}, 0.0)
    heartbeats.pause(100.0)
    heartbeats.reload({"b": Heard(gap=90.0)}, 110.0)  # b alone was cut off from 20 on
    assert heartbeats.silence("a", 150.0) == 50.0


def test_without_others_a_new_rendezvous_counts_from_its_own_beginning() -> None:
    heartbeats = Heartbeats(TIMES)
    heartbeats.reload({"a": Heard()}, 0.0)
    heartbeats.pause(100.0)
    heartbeats.reload({}, 165.0)
    assert heartbeats.silence("a", 200.0) == 35.0


# ---- the stories -----------------------------------------------------------------------------------------------------


def test_an_api_server_that_was_away_for_a_minute_costs_nobody_anything() -> None:
    """As it was seen on a real cluster: all nodes are unready for 50 s after it is back."""
    nodes, names = cluster(a="True", b="True"), ("a", "b")
    nodes.api_returned(60.0, 60.0)
    for name in names:
        nodes.update(node(name, "Unknown"), 61.0)
    for now in range(61, 400):
        if now == 111:
            nodes.update(node("b"), 111.0)
        if now == 118:
            nodes.update(node("a"), 118.0)
        assert not lost(nodes, float(now), silence=0.0)
        assert not lost(nodes, float(now), silence=1000.0), "not even where nobody sends heartbeats"


def test_a_node_that_dies_with_rendezvous_and_operator_is_given_up_in_time() -> None:
    nodes = cluster(a="True", b="True")  # of the operator that took over at 20
    nodes.update(node("a", "Unknown"), 50.0)
    heartbeats = Heartbeats(TIMES)
    heartbeats.reload({}, 65.0)
    heartbeats.update("survivor", Heard(gap=67.0), 66.0)  # the last heartbeat that was answered was one second before
    given_up = next(
        now / 10
        for now in range(650, 3000)
        if evidence(nodes, now / 10, pod=heartbeats.silence("pod", now / 10)).is_lost("pod", "a")
    )
    assert given_up <= 95.0
