"""From pods to ends: each kind of evidence, alone."""

import json
from dataclasses import replace
from typing import Any

import pytest

from basilica.core.mesh import EVERYONE, NO_ANSWER_YET, Pair
from basilica.core.seen import Ended, SeenRank, Sight
from basilica.core.world import WorldSize
from basilica.rendezvous.orders import AttemptRecord, Order, load_record
from basilica.runtimes.kubernetes.mesh import see_mesh
from basilica.runtimes.kubernetes.node_evidence import Evidence, NodeFacts
from basilica.runtimes.kubernetes.parse import Gang, PodFacts, container_end, pod_facts

NOW = 1000.0
ORDER = {0: Order(attempt=0, run=True, world=1)}
RUNNING = AttemptRecord(pod="u1", node="node-0", claimed_at=900.0, started_at=901.0)


def pod(
    state: dict[str, Any] | None = None, *, node: str = "node-0", index: str = "0", **status: Any
) -> dict[str, Any]:
    containers = [] if state is None else [{"name": "rank", "state": state}]
    return {
        "metadata": {
            "name": "train-0-x",
            "uid": "u1",
            "creationTimestamp": "2024-01-01T00:00:00Z",
            "annotations": {"basilica.dev/rank": index},
        },
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Running", "containerStatuses": containers, **status},
    }


def facts(*args: Any, **more: Any) -> PodFacts:
    found = pod_facts(pod(*args, **more), "held")
    assert found is not None
    return found


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {
        "terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": "1970-01-01T00:16:00Z"}
    }


def look(pods: list[PodFacts], records: dict[tuple[int, int], AttemptRecord] | None = None, **more: Any) -> SeenRank:
    evidence = more.pop("evidence", Evidence(nodes={"node-0": NodeFacts()}))
    [seen] = Gang(orders=ORDER, records=records or {}, pods=pods, evidence=evidence, **more).see(NOW)
    return seen


def nodes(unready_for: float | None, silence: float | None) -> Evidence:
    """Of a pod on node-0, beside a node that is well. A rank is lost after 30 s of the node's and 90 of its own."""
    since = None if unready_for is None else 500.0 - unready_for
    return Evidence(
        now=500.0,
        nodes={"node-0": NodeFacts(unready_since=since), "node-1": NodeFacts()},
        lost_after=90.0,
        silences={"u1": silence},
        missed={} if not silence else {"u1": silence},
    )


DISRUPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]


@pytest.mark.parametrize(
    ("found", "code", "reason", "by_platform"),
    [
        (facts(terminated(1)), 1, "Error", False),
        (facts(terminated(137, "OOMKilled")), 137, "OOMKilled", False),
        (facts(terminated(1, "OOMKilled")), 1, "OOMKilled", False),
        (facts(terminated(137)), 137, "SIGKILL", False),
        (facts(terminated(0, "Completed")), 0, "Completed", False),
        (facts(terminated(143), conditions=DISRUPTED), 143, "Evicted", True),
        (facts(terminated(137), phase="Failed", reason="Evicted"), 137, "Evicted", True),
        (replace(facts(terminated(143)), deleting=True), 143, "Terminated", True),
        (facts(terminated(137, "ContainerStatusUnknown")), None, "Unknown", True),
        (facts(None, phase="Failed"), None, "Unknown", True),
    ],
)
def test_what_a_container_tells(found: PodFacts, code: int | None, reason: str, by_platform: bool) -> None:
    ended = container_end(found, NOW)
    assert (ended.exit_code, ended.reason, ended.by_platform) == (code, reason, by_platform)
    seen = look([found], {(0, 0): RUNNING})
    assert seen.sight is Sight.ENDED
    assert seen.ended == ended


def test_the_record_goes_before_the_container() -> None:
    own = Ended(exit_code=3, reason="Error", finished_at=950.0)
    assert look([facts(terminated(137, "OOMKilled"))], {(0, 0): replace(RUNNING, ended=own)}).ended == own


def test_the_termination_message_stands_for_a_record_that_was_lost() -> None:
    own = Ended(exit_code=3, reason="Error", finished_at=950.0, log_tail=("it broke",))
    message = f'{{"basilica": 0, "record": {replace(RUNNING, ended=own).dump()}}}'
    found = facts(terminated(3, "Error", message))
    assert look([found], {(0, 0): RUNNING}).ended == own
    assert look([found]).ended == own


@pytest.mark.parametrize(
    "message", ['{"basilica": 0', '{"basilica": 0, "record": 1}', '{"basilica": "x", "record": {}}', "{}"]
)
def test_a_message_of_somebody_else_is_its_last_words(message: str) -> None:
    ended = look([facts(terminated(1, "Error", message))], {(0, 0): RUNNING}).ended
    assert ended is not None
    assert (ended.exit_code, ended.log_tail) == (1, (message,))


def test_the_platform_says_why_it_ended_a_rank() -> None:
    own = Ended(exit_code=143, reason="Terminated", finished_at=950.0, by_platform=True)
    found = facts(terminated(143), conditions=[{**DISRUPTED[0], "reason": "PreemptionByScheduler"}])
    ended = look([found], {(0, 0): replace(RUNNING, ended=own)}).ended
    assert ended == replace(own, reason="Preempted")


@pytest.mark.parametrize(
    ("unready_for", "silence", "sight"),
    [
        (None, 0.0, Sight.RUNNING),
        (10.0, 0.0, Sight.RUNNING),  # its agent is heard from, whatever the kubelet says
        (1000.0, 0.0, Sight.RUNNING),
        (10.0, 60.0, Sight.UNKNOWN),
        (40.0, 60.0, Sight.UNKNOWN),  # the agent may not have stopped its rank yet
        (10.0, 100.0, Sight.UNKNOWN),
        (40.0, None, Sight.UNKNOWN),  # the rendezvous cannot be asked
        (None, 100.0, Sight.RUNNING),  # the kubelet speaks for it
        (30.0, 90.0, Sight.ENDED),
    ],
)
def test_a_rank_is_lost_when_its_node_and_its_agent_are_silent(
    unready_for: float | None, silence: float | None, sight: Sight
) -> None:
    seen = look([facts({"running": {}})], {(0, 0): RUNNING}, evidence=nodes(unready_for, silence))
    assert seen.sight is sight
    if sight is Sight.ENDED:
        assert seen.ended is not None
        assert (seen.ended.reason, seen.ended.by_platform) == ("NodeLost", True)
    else:
        assert seen.silent_since == (NOW - silence if silence else None)


@pytest.mark.parametrize(
    ("evidence", "ended"),
    [
        (nodes(None, 20.0), True),  # the kubelet has let it go
        (nodes(40.0, 20.0), False),  # Kubernetes gave it up; it may live
        (nodes(40.0, None), False),
        (nodes(40.0, 95.0), True),
        (Evidence(nodes={"node-1": NodeFacts()}, silences={"u1": 20.0}), False),  # its node was deleted
        (Evidence(nodes={"node-1": NodeFacts()}, silences={"u1": 95.0}), True),
    ],
)
@pytest.mark.parametrize("how", ["gone", "failed", "unknown"])
def test_a_pod_that_kubernetes_gave_up_may_live(evidence: Evidence, ended: bool, how: str) -> None:
    """By the garbage collector of pods, or by force: nobody has asked the node."""
    pods = {
        "gone": [],
        "failed": [facts(None, phase="Failed")],
        "unknown": [facts(terminated(137, "ContainerStatusUnknown"))],
    }[how]
    seen = look(pods, {(0, 0): RUNNING}, evidence=evidence, gone={"u1"} if how == "gone" else ())
    assert (seen.ended is not None) == ended


ELSEWHERE = replace(facts({"running": {}}, node="node-1"), uid="u2")
OVER = replace(facts(terminated(1), node="node-1"), uid="u2")


@pytest.mark.parametrize(
    ("evidence", "others", "lost"),
    [
        (nodes(40.0, 95.0), [], True),
        (nodes(40.0, 60.0), [], False),  # the agent may not have stopped its rank yet
        (nodes(40.0, None), [], False),
        (nodes(None, 95.0), [], False),
        (nodes(40.0, 95.0), [ELSEWHERE], False),  # it may run there
        (nodes(40.0, 95.0), [OVER], True),
    ],
)
def test_a_rank_without_a_record_has_ended_when_all_that_may_run_it_is_lost(
    evidence: Evidence, others: list[PodFacts], lost: bool
) -> None:
    gang = Gang(orders={}, records={}, pods=[facts({"running": {}}), *others], evidence=evidence)
    assert gang.nodes_lost() == (frozenset({0}) if lost else frozenset())


def test_an_attempt_is_not_said_to_start_on_a_node_that_is_lost() -> None:
    seen = look([facts({"running": {}})], evidence=nodes(40.0, 95.0))
    assert (seen.sight, seen.note) == (Sight.QUEUED, "waiting for a pod, since node node-0 does not answer")


def test_a_pod_that_no_look_has_shown_yet_is_no_lost_one() -> None:
    assert look([], {(0, 0): RUNNING}).sight is Sight.UNKNOWN
    gone = look([], {(0, 0): RUNNING}, gone={"u1"})
    assert gone.ended is not None
    assert gone.ended.by_platform


@pytest.mark.parametrize(
    ("pods", "sight", "note"),
    [
        ([], Sight.QUEUED, "waiting for a pod"),
        ([facts(None, node="", phase="Pending")], Sight.QUEUED, "waiting for a node"),
        (
            [facts(None, node="", conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}])],
            Sight.QUEUED,
            "0/3 nodes",
        ),
        ([facts({"waiting": {"reason": "ErrImagePull", "message": "no"}})], Sight.STARTING, "ErrImagePull: no"),
        ([facts({"running": {}})], Sight.STARTING, ""),
    ],
)
def test_an_attempt_that_nobody_has_yet_says_what_it_waits_for(pods: list[PodFacts], sight: Sight, note: str) -> None:
    seen = look(pods)
    assert (seen.sight, seen.note) == (sight, note)


def test_a_container_that_never_began_is_a_start_error() -> None:
    ended = look([facts(terminated(1, "Error", "No module named basilica"))]).ended
    assert ended is not None
    assert "No module named basilica" in str(ended.start_error)
    assert look([facts(terminated(1), conditions=DISRUPTED)]).sight is Sight.QUEUED, "an eviction says nothing of it"


def test_a_pod_without_an_index_is_no_rank() -> None:
    assert pod_facts(pod(index=""), "held") is None


def test_records_of_other_versions_are_read_as_far_as_they_are_understood() -> None:
    newer = json.loads(RUNNING.dump()) | {"something": "new"}
    assert load_record(json.dumps(newer)) == RUNNING
    assert load_record("not JSON") is None
    assert load_record('{"pod": 3}') is None


def on(node: str, rank: int, **more: Any) -> PodFacts:
    return PodFacts(name=f"p{rank}", uid=f"u{rank}", rank=rank, created="", node=node, state="running", **more)


def test_what_is_wrong_between_two_ranks_is_wrong_between_their_nodes() -> None:
    asked: list[tuple[str, ...]] = []

    def failing(agents: tuple[str, ...]) -> tuple[Pair, ...]:
        asked.append(agents)
        return (Pair("a/0", "b/2", "refused"), Pair("a/1", "b/2", "refused"))

    seen = see_mesh([on("a", 0), on("a", 1), on("b", 2), on("c", 9)], WorldSize(2, 3, 3), failing, 30.0)
    assert seen is not None
    assert asked == [("a/0", "a/1", "b/2")]
    assert (seen.hosts, seen.failing) == (("a", "b"), (Pair("a", "b", "refused"),))


@pytest.mark.parametrize(("silent", "enough"), [((), True), (("b/2",), True), (("a/1", "b/2"), False)])
def test_the_time_at_the_gate_counts_when_as_many_agents_as_are_needed_are_heard(
    silent: tuple[str, ...], enough: bool
) -> None:
    """Placed is not up: an image may still be on its way."""

    def failing(agents: tuple[str, ...]) -> tuple[Pair, ...]:
        return tuple(Pair(agent, EVERYONE, NO_ANSWER_YET) for agent in agents if agent in silent)

    seen = see_mesh([on("a", 0), on("a", 1), on("b", 2)], WorldSize(2, 3, 3), failing, 30.0)
    assert seen is not None
    assert seen.enough is enough


def test_nobody_is_let_go_before_as_many_as_are_needed_have_a_node() -> None:
    placed = [on("a", 0), on("", 1), replace(on("b", 2), deleting=True)]
    assert see_mesh(placed, WorldSize(2, 3, 3), lambda _: (), 30.0) is None
