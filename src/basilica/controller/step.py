"""One turn of one run: load, observe, decide, save, act. The decision itself is `core.reconcile`."""

from typing import assert_never

from basilica.core.actions import Announce, EndProbe, EndRendezvous, Launch, PersistSnapshots, Plan, Probe, Remove, Stop
from basilica.core.deployment import Deployment
from basilica.core.failing import without_failure
from basilica.core.notice_rules import fresh_steps
from basilica.core.phase import RankPhase
from basilica.core.reconcile import reconcile
from basilica.ports import Clock, Run, Runtime, Store


def run_of(deployment: Deployment, now: float | None = None) -> Run:
    """Return the run as its runtime has to know it; with `now`, for a look of the controller."""
    return Run(
        instance=deployment.instance,
        user=deployment.user,
        namespace=deployment.namespace,
        created_at=deployment.status.created_at,
        spec=deployment.spec,
        owner=deployment.owner,
        lost=frozenset(rank.rank for rank in deployment.status.ranks if rank.phase is RankPhase.LOST),
        fresh_steps=frozenset() if now is None else fresh_steps(deployment.spec, deployment.status, now),
    )


async def step(instance: str, store: Store, runtime: Runtime, clock: Clock) -> tuple[Deployment, float | None]:
    """Run one turn; return the saved run and the time of its next turn.

    The status is saved before any action: a crash in between repeats actions, which are idempotent, and never loses
    or doubles one. After `StaleVersion` the caller runs another turn. The record of earlier failed turns is cleared
    only when the actions of this turn have succeeded.
    """
    deployment = await store.get(instance)
    run = run_of(deployment, clock.now())
    seen = await runtime.observe(run)
    now = clock.now()
    plan = reconcile(deployment.spec, deployment.status, seen, now)
    if plan.status != deployment.status or plan.events:
        deployment = await store.save_status(deployment, plan.status, plan.events, now=now)
    await _apply(plan, run, store, runtime)
    if deployment.status.failing is not None and not any(isinstance(action, Remove) for action in plan.actions):
        deployment = await store.save_status(deployment, without_failure(deployment.status), (), now=now)
    return deployment, plan.wake_at


async def _apply(plan: Plan, run: Run, store: Store, runtime: Runtime) -> None:
    launches: list[Launch] = []
    stops: list[Stop] = []
    announce: Announce | None = None
    end_rendezvous = remove = False
    for action in plan.actions:
        match action:
            case Announce():
                announce = action
            case EndRendezvous():
                end_rendezvous = True
            case Launch():
                launches.append(action)
            case Stop():
                stops.append(action)
            case Remove():
                remove = True
            case Probe():
                await runtime.probe(run, action)
            case EndProbe():
                await runtime.end_probe(run)
            case PersistSnapshots():
                await runtime.persist_snapshots(run)
            case _:
                assert_never(action)
    try:
        if announce is not None:  # before the surplus ranks are stopped, so that the others expect their exit
            await runtime.announce(run, announce.announcement)
    finally:  # a failed announcement must not keep ranks alive that are to stop
        if stops:
            await runtime.stop(run, stops)
    if launches:
        await runtime.launch(run, launches)
    if end_rendezvous:
        await runtime.end_rendezvous(run)
    if remove:
        await runtime.remove(run)
        await store.delete(run.instance)
