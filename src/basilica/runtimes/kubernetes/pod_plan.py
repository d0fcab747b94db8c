"""The plan for a run's pods: from a look at them to the pods to create, delete and release. Pure.

A rank that is ordered to run has exactly one pod. A pod that is over stays for its log; one that was deleted, was
evicted, ended before it claimed an attempt, or is on a lost node is replaced at once, under the next name. A rank that
is no longer wanted gives its pod up: by itself where it runs, so that its log stays, else by deletion.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from basilica.core.seen import Ended, SeenRank, Sight
from basilica.core.spec import Wanted
from basilica.core.world import WorldSize
from basilica.kube.manifests.run import PodGroup
from basilica.rendezvous.orders import AttemptRecord
from basilica.runtimes.kubernetes.parse import Gang, PodFacts
from basilica.runtimes.kubernetes.pod_groups import groups_for, pods_to_close
from basilica.runtimes.kubernetes.pod_ledger import Ledger

GANG_RELEASED = "GangReleased"
LEAVE_WITHIN_S = 30.0
RECHECK_S = 1.0
RENDEZVOUS_FIRST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits, in seconds, on waits that may never end.

    `keyspace_seconds`: for a rendezvous, before a cancelled run is ended without it. `placement_seconds`: for a gang of
    which too few ranks have a node; then it gives its nodes back and tries again after up to `back_off_seconds`.
    """

    keyspace_seconds: float = 30.0
    placement_seconds: float = 600.0
    back_off_seconds: float = 60.0


class Keyspace(Enum):
    """The state of a run's keyspace."""

    NONE = "none"
    SILENT = "silent"  # for less than `keyspace_seconds`
    GIVEN_UP = "given up"  # silent for longer
    ANSWERS = "answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`ranks`: the ranks of the same look. `lost`: ranks that will not be started again.

    `creating`: ranks whose pods are being created. `rendezvous_has_pod`: a pod was created for it, or it answers.
    `gives_up_at`: when a silent keyspace is given up. `pause`: how long a gang that gives its nodes back stays away.
    """

    instance: str
    gang: Gang
    ranks: Sequence[SeenRank]
    world: WorldSize
    wanted: Wanted
    keyspace: Keyspace
    now: float
    lost: Collection[int] = ()
    creating: Collection[int] = ()
    queued: bool = False
    patience: Patience = field(default_factory=Patience)
    pause: float = 60.0
    gives_up_at: float | None = None
    rendezvous_has_pod: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPod:
    """A pod to be created, for an attempt that is ordered."""

    rank: int
    attempt: int
    incarnation: int
    group: PodGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """`end_gang`: delete every pod that is not over. `dismiss`: ranks to be ordered to leave. `due_at`: the next due
    time.
    """

    ledger: Ledger
    conclude: Mapping[tuple[int, int], Ended] = field(default_factory=dict)
    dismiss: tuple[int, ...] = ()
    release: tuple[PodFacts, ...] = ()
    delete: tuple[PodFacts, ...] = ()
    close: tuple[PodFacts, ...] = ()
    end_gang: bool = False
    create: tuple[NewPod, ...] = ()
    due_at: float | None = None


def plan_pods(facts: Facts, ledger: Ledger) -> PodPlan:
    """Decide the actions; total and deterministic. An idempotent action is planned again until the mirror shows its
    effect.
    """
    if ledger.resume_at is not None and facts.now >= ledger.resume_at:
        ledger = replace(ledger, resume_at=None)
    records = facts.gang.merged_records()
    release = tuple(pod for pod in facts.gang.pods if pod.held and _may_go(pod, facts, ledger))
    ledger = replace(ledger, shown=frozenset(pod.uid for pod in facts.gang.pods if pod.held and _has_ended(pod)))
    delete, ledger = _unneeded(facts, records, ledger)
    ledger = _waiting_for_nodes(facts, ledger)
    end_gang = (
        ledger.homeless_since is not None and facts.now >= ledger.homeless_since + facts.patience.placement_seconds
    )
    create: tuple[NewPod, ...] = ()
    if end_gang:
        ledger = _given_back(facts, ledger)
    else:
        create, ledger = _to_create(facts, records, ledger)
    return PodPlan(
        ledger=ledger,
        conclude=_silent_ends(facts),
        dismiss=_to_dismiss(facts),
        release=release,
        delete=() if end_gang else delete,
        close=pods_to_close(facts.gang.pods, lambda rank: not _is_unwanted(rank, facts)) if facts.queued else (),
        end_gang=end_gang,
        create=create,
        due_at=_next_due(facts, ledger, create),
    )


# ---- ends ------------------------------------------------------------------------------------------------------------


def _silent_ends(facts: Facts) -> dict[tuple[int, int], Ended]:
    """Return the ends that only containers or nodes show: they must be recorded, since pods do not stay."""
    if facts.keyspace is not Keyspace.ANSWERS:
        return {}
    silent = {key for key, record in facts.gang.records.items() if record.ended is None}
    found = {(seen.rank, seen.attempt): seen.ended for seen in facts.ranks}
    return {key: ended for key, ended in found.items() if ended is not None and key in silent}


def _has_ended(pod: PodFacts) -> bool:
    return pod.deleting and pod.state != "running"


def _may_go(pod: PodFacts, facts: Facts, ledger: Ledger) -> bool:
    """Whether nothing runs in the pod, and its rank's end, if it had one, is recorded.

    Where the keyspace cannot record it, and nothing more is to come of the run or of the keyspace, it is enough that an
    earlier look has shown it.
    """
    if not _has_ended(pod):
        return False
    if facts.keyspace is Keyspace.ANSWERS:
        return all(record.ended is not None for record in facts.gang.records.values() if record.pod == pod.uid)
    return _is_hopeless(facts, ledger) and pod.uid in ledger.shown


def _is_hopeless(facts: Facts, ledger: Ledger) -> bool:
    return facts.wanted is not Wanted.RUN or ledger.terminating or facts.keyspace is not Keyspace.SILENT


# ---- pods to give up -------------------------------------------------------------------------------------------------


def _is_unwanted(rank: int, facts: Facts) -> bool:
    """Whether the rank's pod is of no more use."""
    order = facts.gang.orders.get(rank)
    if order is not None:
        return not order.run and order.leave
    known = facts.keyspace is Keyspace.ANSWERS
    return known and (rank >= facts.world.target or facts.wanted is not Wanted.RUN)


def _to_dismiss(facts: Facts) -> tuple[int, ...]:
    """Return the ranks that are lost for good and still have a pod."""
    if facts.keyspace is not Keyspace.ANSWERS:
        return ()
    ended = {(seen.rank, seen.attempt) for seen in facts.ranks if seen.sight is Sight.ENDED}
    living = {pod.rank for pod in facts.gang.pods if not pod.over and not pod.deleting}
    orders = facts.gang.orders
    return tuple(
        rank
        for rank in sorted(facts.lost)
        if rank in living and rank in orders and orders[rank].run and (rank, orders[rank].attempt) in ended
    )


def _unneeded(
    facts: Facts, records: Mapping[tuple[int, int], AttemptRecord], ledger: Ledger
) -> tuple[tuple[PodFacts, ...], Ledger]:
    """Return the pods to delete: those that cannot leave by themselves, are lost, or are one too many."""
    open_in = {record.pod for record in records.values() if record.ended is None}
    delete: list[PodFacts] = []
    leaving: dict[str, float] = {}
    usable: dict[int, list[PodFacts]] = {}
    for pod in facts.gang.pods:
        if pod.over or pod.deleting:
            continue
        if facts.gang.evidence.is_lost(pod.uid, pod.node):
            delete.append(pod)
        elif not _is_unwanted(pod.rank, facts):
            usable.setdefault(pod.rank, []).append(pod)
        elif pod.state != "running":
            delete.append(pod)
        elif pod.uid not in open_in:
            since = leaving[pod.uid] = ledger.leaving.get(pod.uid, facts.now)
            if facts.now >= since + LEAVE_WITHIN_S:
                delete.append(pod)
    if facts.keyspace is Keyspace.ANSWERS:
        for pods in usable.values():
            kept = max(pods, key=lambda pod: (pod.uid in open_in, pod.incarnation))
            delete += [pod for pod in pods if pod is not kept and pod.uid not in open_in]
    return tuple(delete), replace(ledger, leaving=leaving)


# ---- pods to create --------------------------------------------------------------------------------------------------


def _to_create(
    facts: Facts, records: Mapping[tuple[int, int], AttemptRecord], ledger: Ledger
) -> tuple[tuple[NewPod, ...], Ledger]:
    if facts.wanted is not Wanted.RUN or facts.keyspace is Keyspace.NONE:
        return (), ledger
    needed = _ranks_without_pods(facts, records)
    claimed = {record.pod for record in records.values()}
    for rank in needed:
        birth = ledger.births.get(rank)
        ledger = ledger.missed(rank, facts.now, claimed=birth is not None and birth.uid in claimed)
    if not needed:
        return (), replace(ledger, outrun_since=None, refusal=ledger.refusal if facts.creating else None)
    ledger = _behind_the_rendezvous(facts, ledger)
    if ledger.terminating or ledger.resume_at is not None:
        return (), ledger
    due = [rank for rank in needed if ledger.next_pod_at(rank) <= facts.now]
    groups = groups_for(facts.instance, due, facts.gang.pods) if facts.queued else {}
    if ledger.refusal is not None or ledger.outrun_since is not None:  # one pod probes for all
        due = due[:1] if _may_probe(facts, ledger) else []
    orders, names = facts.gang.orders, _last_incarnations(facts.gang.pods)
    found = (
        NewPod(
            rank=rank,
            attempt=orders[rank].attempt,
            incarnation=max(orders[rank].attempt, names.get(rank, -1) + 1),
            group=groups.get(rank),
        )
        for rank in due
    )
    return tuple(found), ledger


def _behind_the_rendezvous(facts: Facts, ledger: Ledger) -> Ledger:
    """Hold ranks back until the rendezvous has its pod: a quota may be too small for it once all ranks have theirs."""
    if facts.rendezvous_has_pod:
        return replace(ledger, outrun_since=None)
    return ledger if ledger.outrun_since is not None else replace(ledger, outrun_since=facts.now)


def _may_probe(facts: Facts, ledger: Ledger) -> bool:
    """Whether one pod may probe, also while the rendezvous gets none: a refusal of that pod applies to this one too."""
    living = sum(not pod.over and not pod.deleting for pod in facts.gang.pods)
    if facts.creating or (ledger.outrun_since is not None and living):
        return False
    if ledger.outrun_since is not None and facts.now < ledger.outrun_since + RENDEZVOUS_FIRST_S:
        return False
    return ledger.refusal is None or facts.now >= ledger.refusal.retry_at or living < ledger.refusal.living


def _ranks_without_pods(facts: Facts, records: Mapping[tuple[int, int], AttemptRecord]) -> list[int]:
    gang = facts.gang
    ended = {(seen.rank, seen.attempt) for seen in facts.ranks if seen.sight is Sight.ENDED}
    there = (pod for pod in gang.pods if not pod.over and not pod.deleting)
    has_pod = {pod.rank for pod in there if not gang.evidence.is_lost(pod.uid, pod.node)}
    return [
        rank
        for rank, order in sorted(gang.orders.items())
        if order.run
        and (rank, order.attempt) not in records
        and (rank, order.attempt) not in ended
        and rank not in has_pod
        and rank not in facts.creating
    ]


def _last_incarnations(pods: Collection[PodFacts]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pod in pods:
        found[pod.rank] = max(pod.incarnation, found.get(pod.rank, -1))
    return found


# ---- half-placed gangs -----------------------------------------------------------------------------------------------


def _placed_and_homeless(facts: Facts) -> tuple[int, list[PodFacts]]:
    living = [pod for pod in facts.gang.pods if not pod.over and not pod.deleting]
    homeless = [pod for pod in living if not pod.node]
    return len(living) - len(homeless), homeless


def _waiting_for_nodes(facts: Facts, ledger: Ledger) -> Ledger:
    """Note since when a gang is half placed: two such gangs would wait for each other for ever. Queues prevent that."""
    placed, homeless = _placed_and_homeless(facts)
    began = any(record.started_at is not None for record in facts.gang.records.values())
    is_stuck = not began and 0 < placed < facts.world.min and bool(homeless)
    if facts.queued or facts.wanted is not Wanted.RUN or not is_stuck:
        return replace(ledger, homeless_since=None)
    return ledger if ledger.homeless_since is not None else replace(ledger, homeless_since=facts.now)


def _given_back(facts: Facts, ledger: Ledger) -> Ledger:
    placed, homeless = _placed_and_homeless(facts)
    warning = (
        f"only {placed} of the {facts.world.min} ranks that are needed found a node within "
        f"{facts.patience.placement_seconds:g} s ({homeless[0].unschedulable or 'no node'}): it lets go of them "
        "and tries again"
    )
    resume_at = facts.now + facts.pause
    return replace(ledger, homeless_since=None, resume_at=resume_at, births={}, warnings=((GANG_RELEASED, warning),))


# ---- the next due time -----------------------------------------------------------------------------------------------


def _next_due(facts: Facts, ledger: Ledger, create: Sequence[NewPod]) -> float | None:
    """Return the next moment at which the plan changes although no fact has."""
    being_made = {new.rank for new in create} | set(facts.creating)
    dues = [birth.next_at for rank, birth in ledger.births.items() if rank not in being_made]
    dues += [ledger.resume_at, *(since + LEAVE_WITHIN_S for since in ledger.leaving.values())]
    if ledger.refusal is not None and not ledger.terminating:
        dues.append(ledger.refusal.retry_at)
    if ledger.outrun_since is not None:
        dues.append(ledger.outrun_since + RENDEZVOUS_FIRST_S)
    if ledger.homeless_since is not None:
        dues.append(ledger.homeless_since + facts.patience.placement_seconds)
    if ledger.shown and facts.keyspace is not Keyspace.ANSWERS:
        dues.append(facts.now + RECHECK_S if _is_hopeless(facts, ledger) else facts.gives_up_at)
    return min((at for at in dues if at is not None and at > facts.now), default=None)
