"""Plans for pods: each fact and its consequence, alone."""

from dataclasses import replace
from typing import Any

import pytest

from basilica.core.seen import Ended
from basilica.core.spec import Wanted
from basilica.core.world import WorldSize
from basilica.kube.manifests.run import PodGroup
from basilica.rendezvous.orders import AttemptRecord, Order
from basilica.runtimes.kubernetes.node_evidence import Evidence, NodeFacts
from basilica.runtimes.kubernetes.parse import Gang, PodFacts
from basilica.runtimes.kubernetes.pod_ledger import LONGEST_PAUSE_S, Birth, Ledger, Refusal
from basilica.runtimes.kubernetes.pod_plan import (
    GANG_RELEASED,
    LEAVE_WITHIN_S,
    Facts,
    Keyspace,
    Patience,
    PodPlan,
    plan_pods,
)

NOW = 1000.0
ENDED = Ended(exit_code=143, reason="Terminated", finished_at=NOW, by_platform=True)
RUN = Order(attempt=0, run=True, world=2)
LEAVE = Order(attempt=0, run=False, leave=True)


def pod(rank: int = 0, incarnation: int = 0, state: Any = "running", **more: Any) -> PodFacts:
    name = f"train-{rank}-{incarnation}"
    known = {"phase": "Running", "node": "node-0", "incarnation": incarnation, "state": state, **more}
    return PodFacts(name=name, uid=f"uid-{rank}-{incarnation}", rank=rank, created="", **known)


def dead(rank: int = 0, incarnation: int = 0, **more: Any) -> PodFacts:
    return pod(rank, incarnation, "terminated", phase="Failed", exit_code=143, **more)


def claim(rank: int = 0, incarnation: int = 0, **more: Any) -> AttemptRecord:
    return AttemptRecord(pod=f"uid-{rank}-{incarnation}", claimed_at=900.0, started_at=901.0, **more)


def facts(
    *pods: PodFacts,
    orders: dict[int, Order] | None = None,
    records: dict[tuple[int, int], AttemptRecord] | None = None,
    nodes: dict[str, NodeFacts] | None = None,
    world: tuple[int, int, int] = (1, 2, 4),
    **more: Any,
) -> Facts:
    evidence = Evidence(
        now=NOW, nodes={"another": NodeFacts(), **(nodes or {})}, silences={each.uid: NOW for each in pods}
    )
    gang = Gang(orders={0: RUN} if orders is None else orders, records=records or {}, pods=pods, evidence=evidence)
    given = {"wanted": Wanted.RUN, "keyspace": Keyspace.ANSWERS, "now": NOW, **more}
    return Facts(instance="train", gang=gang, ranks=gang.see(NOW), world=WorldSize(*world), **given)


def made(plan: PodPlan) -> list[tuple[int, int]]:
    return [(new.rank, new.incarnation) for new in plan.create]


def deleted(plan: PodPlan) -> list[str]:
    return [pod.name for pod in plan.delete]


# ---- a rank that is ordered has a pod --------------------------------------------------------------------------------

NEXT = {0: Order(attempt=1, run=True)}
OVER = {(0, 0): claim(ended=ENDED)}


@pytest.mark.parametrize(
    ("seen", "new"),
    [
        (facts(), [(0, 0)]),
        (facts(orders={0: RUN, 1: RUN}), [(0, 0), (1, 0)]),
        (facts(orders={}), []),
        (facts(orders={0: LEAVE}), []),
        (facts(pod(state="")), []),
        (facts(pod()), []),
        (facts(dead(), records={(0, 0): claim()}), []),  # its end is to be decided upon first
        (facts(dead(), orders=NEXT, records=OVER), [(0, 1)]),
        (facts(pod(deleting=True), orders=NEXT, records=OVER), [(0, 1)]),  # at once, while it still goes
        (facts(pod(), orders=NEXT, records=OVER), []),  # a restart in the same pod
        (facts(orders=NEXT, records=OVER), [(0, 1)]),
        (facts(dead(0, 6), orders=NEXT, records=OVER), [(0, 7)]),
        (facts(creating={0}), []),
        (facts(wanted=Wanted.CANCEL), []),
        (facts(wanted=Wanted.DELETE), []),
        (facts(keyspace=Keyspace.SILENT), [(0, 0)]),  # it begins together with the pods
        (facts(keyspace=Keyspace.NONE), []),
    ],
)
def test_a_rank_that_is_ordered_and_has_no_pod_gets_one(seen: Facts, new: list[tuple[int, int]]) -> None:
    assert made(plan_pods(seen, Ledger())) == new


def test_a_pod_that_cannot_begin_is_the_run_s_failure_and_not_made_again() -> None:
    broken = pod(state="terminated", phase="Failed", exit_code=2, message="no module named basilica")
    assert made(plan_pods(facts(broken), Ledger())) == []


def test_a_pod_on_a_node_that_is_given_up_is_replaced_and_deleted() -> None:
    silent = {"node-0": NodeFacts(unready_since=NOW - 31)}
    plan = plan_pods(facts(pod(), orders=NEXT, records=OVER, nodes=silent), Ledger())
    assert (made(plan), deleted(plan)) == ([(0, 1)], ["train-0-0"])
    unsure = {"node-0": NodeFacts(unready_since=NOW - 29)}
    plan = plan_pods(facts(pod(), orders=NEXT, records=OVER, nodes=unsure), Ledger())
    assert (made(plan), deleted(plan)) == ([], [])


def test_a_disrupted_rank_comes_back_at_once_however_often() -> None:
    ledger = Ledger()
    for attempt in range(50):
        now = NOW + 10 * attempt
        records = {(0, n): claim(0, n, ended=ENDED) for n in range(attempt)}
        plan = plan_pods(facts(orders={0: Order(attempt=attempt, run=True)}, records=records, now=now), ledger)
        assert made(plan) == [(0, attempt)]
        ledger = plan.ledger.born(0, f"uid-0-{attempt}", now)


def test_pods_that_end_before_they_took_anything_up_are_made_after_pauses_that_grow() -> None:
    ledger, now, pauses = Ledger(), NOW, []
    for number in range(10):
        before = now
        plan = plan_pods(facts(now=now), ledger)
        while not plan.create:
            assert plan.due_at is not None
            assert f"{number} in a row ended before they took anything up" in plan.ledger.held_back(now)[0]
            now = plan.due_at
            plan = plan_pods(facts(now=now), plan.ledger)
        pauses.append(now - before)
        assert plan.ledger.held_back(now) == {}
        ledger = plan.ledger.born(0, f"uid-0-{number}", now)
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30]
    claimed = facts(now=now + 60, orders=NEXT, records={(0, 0): claim(0, 9, ended=ENDED)})
    assert made(plan_pods(claimed, ledger)) == [(0, 1)], "one that did its work is the end of it"


def test_one_that_lasted_a_moment_only_counts_although_it_took_something_up() -> None:
    ledger = Ledger(births={0: Birth(at=NOW - 0.5, uid="uid-0-0", fruitless=3)})
    plan = plan_pods(facts(orders=NEXT, records=OVER), ledger)
    assert (made(plan), plan.due_at) == ([], NOW + 4)


# ---- pods that are refused -------------------------------------------------------------------------------------------


def test_of_pods_that_are_refused_one_tries_for_all_after_pauses_that_grow() -> None:
    ledger, orders = Ledger().refused("exceeded quota", NOW, 2), {rank: RUN for rank in range(4)}
    assert ledger.waiting_for() == "a pod, which Kubernetes refuses: exceeded quota"
    assert ledger.refused("exceeded quota", NOW + 0.5, 2).refusal == ledger.refusal, "32 at once are one refusal"
    for pause in (1, 2, 4, 8, 16, 30, 30):
        assert ledger.refusal is not None
        retry_at = ledger.refusal.retry_at
        early = plan_pods(facts(pod(2), pod(3), orders=orders, now=retry_at - 0.1), ledger)
        assert (made(early), early.due_at) == ([], retry_at)
        assert made(plan_pods(facts(pod(2), pod(3), orders=orders, now=retry_at), ledger)) == [(0, 0)]
        after = ledger.refused("exceeded quota", retry_at, 2)
        assert after.refusal is not None
        assert ledger.refusal.retry_at - NOW == pytest.approx(pause) or pause == LONGEST_PAUSE_S
        ledger = Ledger(refusal=replace(after.refusal, retry_at=NOW + after.refusal.retry_at - retry_at))
    made_again = ledger.born(0, "uid", NOW)
    assert made(plan_pods(facts(pod(0), orders=orders), made_again)) == [(1, 0), (2, 0), (3, 0)]


def test_a_pod_of_the_run_that_ends_may_make_room() -> None:
    ledger = Ledger(refusal=Refusal(message="exceeded quota", retry_at=NOW + 30, living=2))
    orders = {rank: RUN for rank in range(3)}
    assert made(plan_pods(facts(pod(1), pod(2), orders=orders), ledger)) == []
    assert made(plan_pods(facts(pod(1), dead(2), orders=orders), ledger)) == [(0, 0)]


def test_a_refusal_is_forgotten_with_the_wish() -> None:
    ledger = Ledger(refusal=Refusal(message="exceeded quota", retry_at=NOW + 30, living=2))
    plan = plan_pods(facts(orders={0: LEAVE}), ledger)
    assert (plan.ledger.refusal, plan.due_at) == (None, None)


def test_the_rendezvous_gets_its_pod_first_and_one_rank_finds_out_why_it_gets_none() -> None:
    """A quota that has room for it, and not for all ranks beside it, must not be used up before."""
    orders = {0: RUN, 1: RUN}
    seen = facts(orders=orders, keyspace=Keyspace.SILENT, rendezvous_has_pod=False)
    first = plan_pods(seen, Ledger())
    assert (made(first), first.due_at) == ([], NOW + 5)
    assert first.ledger.waiting_for() == "a pod, which the run's rendezvous gets first"
    assert made(plan_pods(replace(seen, rendezvous_has_pod=True), first.ledger)) == [(0, 0), (1, 0)]
    then = replace(seen, now=NOW + 5)
    assert made(plan_pods(then, first.ledger)) == [(0, 0)]
    refused = first.ledger.refused("exceeded quota", NOW + 5, 0)
    assert refused.waiting_for() == "a pod, which Kubernetes refuses: exceeded quota"
    assert made(plan_pods(replace(seen, now=NOW + 6), refused)) == [(0, 0)]
    alone = facts(pod(0), orders=orders, keyspace=Keyspace.SILENT, rendezvous_has_pod=False, now=NOW + 60)
    assert made(plan_pods(alone, first.ledger)) == [], "one of them leaves it room"


def test_in_a_namespace_that_is_being_deleted_nothing_is_made_and_nothing_is_waited_for() -> None:
    ledger = Ledger(terminating=True, refusal=Refusal(message="forbidden", retry_at=NOW + 30, living=2))
    plan = plan_pods(facts(orders=NEXT, records=OVER), ledger)
    assert (made(plan), plan.due_at) == ([], None)
    assert "the namespace is being deleted" in ledger.waiting_for()


# ---- pods that are let go of -----------------------------------------------------------------------------------------

HELD = dead(held=True, deleting=True)
UNTOLD = {(0, 0): claim()}


@pytest.mark.parametrize(
    ("seen", "ledger", "goes"),
    [
        (facts(replace(HELD, deleting=False), records=OVER), Ledger(), False),
        (facts(HELD, records=OVER), Ledger(), True),
        (facts(HELD, records={}), Ledger(), True),
        (facts(HELD, records=UNTOLD), Ledger(), False),  # its end is recorded first
        (facts(pod(held=True, deleting=True), records=OVER), Ledger(), False),  # something runs in it
        (facts(pod(state="waiting", held=True, deleting=True, phase="Pending")), Ledger(), True),
        (facts(HELD, records=UNTOLD, keyspace=Keyspace.SILENT), Ledger(shown=frozenset({HELD.uid})), False),
        (facts(HELD, records=UNTOLD, keyspace=Keyspace.GIVEN_UP), Ledger(), False),
        (facts(HELD, records=UNTOLD, keyspace=Keyspace.GIVEN_UP), Ledger(shown=frozenset({HELD.uid})), True),
        (facts(HELD, records=UNTOLD, keyspace=Keyspace.NONE), Ledger(shown=frozenset({HELD.uid})), True),
        (
            facts(HELD, records=UNTOLD, keyspace=Keyspace.SILENT),
            Ledger(shown=frozenset({HELD.uid}), terminating=True),
            True,
        ),
        (
            facts(HELD, records=UNTOLD, keyspace=Keyspace.SILENT, wanted=Wanted.DELETE),
            Ledger(shown=frozenset({HELD.uid})),
            True,
        ),
    ],
)
def test_a_deleted_pod_is_held_until_its_rank_s_end_is_recorded(seen: Facts, ledger: Ledger, goes: bool) -> None:
    assert bool(plan_pods(seen, ledger).release) is goes


def test_what_was_shown_once_is_let_go_of_by_a_later_look() -> None:
    seen = facts(HELD, records=UNTOLD, keyspace=Keyspace.SILENT, wanted=Wanted.DELETE)
    first = plan_pods(seen, Ledger())
    assert (first.release, first.due_at) == ((), NOW + 1)
    assert plan_pods(seen, first.ledger).release == (HELD,)
    waiting = plan_pods(replace(seen, wanted=Wanted.RUN, gives_up_at=NOW + 20), Ledger())
    assert waiting.due_at == NOW + 20


def test_ends_that_only_containers_tell_of_are_recorded() -> None:
    assert set(plan_pods(facts(dead(), records=UNTOLD), Ledger()).conclude) == {(0, 0)}
    assert not plan_pods(facts(dead(), records=UNTOLD, keyspace=Keyspace.SILENT), Ledger()).conclude


# ---- ranks that are not wanted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "gone"),
    [
        (facts(pod(3, state=""), orders={3: LEAVE}), ["train-3-0"]),  # it cannot leave by itself
        (facts(pod(3, state="waiting"), orders={3: LEAVE}), ["train-3-0"]),
        (facts(pod(3), orders={3: LEAVE}), []),
        (facts(dead(3), orders={3: LEAVE}), []),  # it stays for its log
        (facts(pod(3, state="", deleting=True), orders={3: LEAVE}), []),
        (facts(pod(3, state=""), orders={}), ["train-3-0"]),
        (facts(pod(1, state=""), orders={}), []),  # of the world, and its order may come
        (facts(pod(1, state=""), orders={}, wanted=Wanted.CANCEL), ["train-1-0"]),
        (facts(pod(3, state=""), orders={}, keyspace=Keyspace.SILENT), []),  # who knows
        (facts(pod(0, 0), pod(0, 1)), ["train-0-0"]),  # one is enough
        (facts(pod(0, 0), pod(0, 1), records={(0, 0): claim()}), ["train-0-1"]),
        (facts(pod(0, 0), pod(0, 1), keyspace=Keyspace.SILENT), []),
    ],
)
def test_pods_that_are_of_no_use_are_deleted(seen: Facts, gone: list[str]) -> None:
    assert deleted(plan_pods(seen, Ledger())) == gone


def test_a_container_that_does_not_leave_is_deleted_after_a_while() -> None:
    seen = facts(pod(3), orders={3: LEAVE}, records={(3, 0): claim(3, ended=ENDED)})
    first = plan_pods(seen, Ledger())
    assert (deleted(first), first.due_at) == ([], NOW + LEAVE_WITHIN_S)
    assert deleted(plan_pods(replace(seen, now=NOW + LEAVE_WITHIN_S), first.ledger)) == ["train-3-0"]
    running = facts(pod(3), orders={3: LEAVE}, records={(3, 0): claim(3)})
    patient = plan_pods(running, Ledger(leaving={"uid-3-0": NOW - 100}))
    assert (deleted(patient), patient.due_at) == ([], None), "its grace has its own end"


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (facts(pod(), records=OVER, lost={0}), (0,)),
        (facts(pod(), records=OVER), ()),  # it may be started again
        (facts(pod(), records={(0, 0): claim()}, lost={0}), ()),
        (facts(dead(), records=OVER, lost={0}), ()),
        (facts(pod(), orders={0: LEAVE}, records=OVER, lost={0}), ()),
        (facts(pod(), records=OVER, lost={0}, keyspace=Keyspace.SILENT), ()),
    ],
)
def test_a_rank_that_is_lost_for_good_gives_its_pod_up(seen: Facts, told: tuple[int, ...]) -> None:
    assert plan_pods(seen, Ledger()).dismiss == told


# ---- gangs that are placed by half -----------------------------------------------------------------------------------

HALF = facts(
    pod(0, state=""),
    pod(1, state="", node="", unschedulable="0/1 nodes are available"),
    orders={0: RUN, 1: RUN},
    world=(2, 2, 2),
    patience=Patience(placement_seconds=600),
    pause=45.0,
)


def test_half_of_a_gang_gives_its_nodes_back_and_stays_away_for_a_while() -> None:
    first = plan_pods(HALF, Ledger())
    assert (first.end_gang, first.due_at) == (False, NOW + 600)
    then = replace(HALF, now=NOW + 600)
    second = plan_pods(then, first.ledger)
    assert second.end_gang
    [(reason, told)] = second.ledger.warnings
    assert reason == GANG_RELEASED
    assert "only 1 of the 2 ranks that are needed" in told
    empty = facts(orders={0: RUN, 1: RUN}, now=NOW + 610)
    away = plan_pods(empty, second.ledger)
    assert (made(away), away.due_at) == ([], NOW + 645)
    assert "gave its nodes back" in away.ledger.waiting_for()
    assert made(plan_pods(replace(empty, now=NOW + 645), away.ledger)) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    "seen",
    [
        replace(HALF, world=WorldSize(1, 2, 2)),  # enough have one
        replace(HALF, queued=True),  # a queue sees to it
        replace(HALF, wanted=Wanted.CANCEL),
        replace(HALF, gang=replace(HALF.gang, records={(0, 0): claim()})),  # it has begun
    ],
)
def test_a_gang_is_given_back_only_where_it_waits_in_vain(seen: Facts) -> None:
    waiting = Ledger(homeless_since=NOW - 601)
    assert not plan_pods(seen, waiting).end_gang


# ---- groups of Kueue -------------------------------------------------------------------------------------------------

FIRST = PodGroup("train", 2)


def groups(plan: PodPlan) -> dict[int, PodGroup | None]:
    return {new.rank: new.group for new in plan.create}


@pytest.mark.parametrize(
    ("pods", "found"),
    [
        ((), {0: PodGroup("train", 3), 1: PodGroup("train", 3), 2: PodGroup("train", 3)}),
        ((pod(0, group=FIRST), dead(1, group=FIRST), pod(2)), {1: FIRST}),  # in the place of another
        ((pod(0, group=FIRST), pod(1, group=FIRST)), {2: PodGroup("train-2", 1)}),  # one more
        ((pod(0, group=PodGroup("train", 3)),), {1: PodGroup("train", 3), 2: PodGroup("train", 3)}),  # interrupted
        (
            (pod(0, group=FIRST), dead(1, group=FIRST, group_closed=True), pod(2)),
            {1: PodGroup("train-2", 1)},
        ),
    ],
)
def test_pods_of_a_queue_are_admitted_in_groups(pods: tuple[PodFacts, ...], found: dict[int, PodGroup]) -> None:
    seen = facts(*pods, orders={rank: RUN for rank in range(3)}, queued=True)
    assert groups(plan_pods(seen, Ledger())) == found
    assert not any(groups(plan_pods(replace(seen, queued=False), Ledger())).values())


def test_a_group_whose_size_is_refused_in_part_keeps_its_size() -> None:
    ledger = Ledger(refusal=Refusal(message="exceeded quota", retry_at=NOW, living=0))
    plan = plan_pods(facts(orders={rank: RUN for rank in range(3)}, queued=True), ledger)
    assert groups(plan) == {0: PodGroup("train", 3)}


@pytest.mark.parametrize(
    ("pods", "closed"),
    [
        ((dead(2, group=FIRST), dead(3, group=FIRST)), ["train-3-0"]),
        ((dead(2, group=FIRST), pod(3, group=FIRST)), []),
        ((dead(2, group=FIRST, group_closed=True), dead(3, group=FIRST)), []),
        ((dead(0, group=FIRST), dead(3, group=FIRST)), []),  # rank 0 is wanted, and a pod comes in its place
        ((replace(dead(2, group=FIRST), phase="Succeeded"),), []),  # Kueue knows that by itself
    ],
)
def test_a_group_of_ranks_that_are_not_wanted_any_more_is_closed(pods: tuple[PodFacts, ...], closed: list[str]) -> None:
    seen = facts(*pods, orders={0: RUN, 2: LEAVE, 3: LEAVE}, records={(0, 0): claim()}, queued=True)
    assert [pod.name for pod in plan_pods(seen, Ledger()).close] == closed
