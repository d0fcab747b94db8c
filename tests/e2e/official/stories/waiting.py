"""Waiting for a run, with every way that a wait can end."""

import asyncio
from typing import Any

from tests.e2e.official.published import User, after_first_look, in_a_hurry, outcome, plain, story

UNOBTAINABLE = {"gpu_count": 1, "gpu_models": ["no such model"]}


@story
def waits_for_the_world_return_when_it_is_there(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("worlds", gate.wait, size=(2, 2, 2))
    calls = (training.wait_until_min_world, training.wait_until_target_world)
    running = [outcome(lambda w=wait: w(timeout=0)) for wait in calls]  # type: ignore[misc]
    patient = [outcome(lambda w=wait: w(timeout=15)) for wait in calls]  # type: ignore[misc]
    gate.open()
    user.until_phase(training, "succeeded")
    ended = [outcome(lambda w=wait: w(timeout=15)) for wait in calls]  # type: ignore[misc]
    return {"at_once": running, "running": patient, "ended": ended}


@story
@in_a_hurry
def a_world_that_does_not_come_times_out(user: User) -> Any:
    deployed = outcome(lambda: user.deploy("unobtainable", ["true"], size=(2, 2, 2), timeout=1, **UNOBTAINABLE))
    found = outcome(lambda: user.client.get_by_name("unobtainable").phase)
    return {"deployed": deployed, "found": found}


@story
def wait_until_complete_returns_the_final_world(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("completes", gate.wait)
    after_first_look(training, gate.open)
    return plain(training.wait_until_complete(timeout=30))


@story
def wait_until_complete_tells_how_ranks_failed(user: User) -> Any:
    gate = user.gate("go")
    script = f'{gate.wait}; [ "$BASILICA_RANK" = 1 ] && exit 3; exec sleep 600'
    training = user.shell("completes-badly", script, size=(2, 2, 2))
    after_first_look(training, gate.open)
    return {"name": training.name, "waited": outcome(lambda: training.wait_until_complete(timeout=30))}


@story
def wait_until_complete_async_does_the_same(user: User) -> Any:
    gate, bad_gate = user.gate("go"), user.gate("fail")
    good = user.shell("async-completes", gate.wait)
    bad = user.shell("async-fails", f"{bad_gate.wait}; exit 7", size=(1, 1, 1))
    after_first_look(good, gate.open)
    after_first_look(bad, bad_gate.open)

    async def wait() -> Any:
        waits = (good.wait_until_complete_async(timeout=30), bad.wait_until_complete_async(timeout=30))
        return await asyncio.gather(*waits, return_exceptions=True)

    world, error = asyncio.run(wait())
    already = outcome(lambda: asyncio.run(good.wait_until_complete_async(timeout=30)))
    return {"world": plain(world), "error": type(error).__name__, "text": str(error), "already": already}


@story
def wait_until_complete_refuses_what_is_over(user: User) -> Any:
    gate = user.gate("fail")
    good = user.deploy("over", ["true"])
    bad = user.shell("over-badly", f"{gate.wait}; exit 1", size=(1, 1, 1))
    gate.open()
    user.until_phase(good, "succeeded")
    user.until_phase(bad, "failed")
    return [outcome(lambda t=t: t.wait_until_complete(timeout=30)) for t in (good, bad)]  # type: ignore[misc]


@story
def wait_until_complete_times_out_while_the_run_goes_on(user: User) -> Any:
    training = user.deploy("endless", ["sleep", "600"])
    waited = outcome(lambda: training.wait_until_complete(timeout=1))
    training.delete()
    return waited


@story
def a_failed_run_ends_the_wait_for_its_target(user: User) -> Any:
    gate = user.gate("fail")
    training = user.shell("target-fails", f'{gate.wait}; exit "$BASILICA_RANK"', size=(2, 2, 2))
    gate.open()
    user.until_phase(training, "failed")
    return outcome(lambda: training.wait_until_target_world(timeout=15))


@story
def a_cancelled_run_ends_the_wait(user: User) -> Any:
    training = user.deploy("cancelled", ["sleep", "600"])
    after_first_look(training, lambda: user.curl("POST", f"/deployments/{training.name}/cancel"))
    waited = outcome(lambda: training.wait_until_complete(timeout=30))
    user.until_settled(training)
    return {"waited": waited, "exits": user.exits(training), "phase": training.phase}


@story
def time_to_live_cancels_a_run(user: User) -> Any:
    training = user.deploy("lives-briefly", ["sleep", "600"], ttl_seconds=15)  # time to be seen up
    user.until_phase(training, "cancelled")
    user.until_settled(training)
    newest = training.events()[0]
    return {"exits": user.exits(training), "ready": training.world.ready, "event": newest["reason"]}
