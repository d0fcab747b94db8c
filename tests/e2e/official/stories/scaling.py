"""Changing how many ranks there are."""

from typing import Any

from tests.e2e.official.published import User, outcome, plain, story, until


def up(gate_wait: str) -> str:
    return f"trap 'echo drained; exit 0' TERM; echo up; {gate_wait}"


def ranks(training: Any) -> list[tuple[int, str]]:
    training.refresh()
    return [(r.rank, r.phase) for r in training.ranks]


@story
def a_run_grows_and_shrinks(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("grow", up(gate.wait), size=(1, 2, 4))
    training.wait_until_target_world(timeout=15)
    before = ranks(training)

    asked_up = training.scale(4)
    training.wait_until_target_world(timeout=15)
    grown, grown_world = ranks(training), training.world

    asked_down = training.scale(2)
    training.wait_until_target_world(timeout=15)
    shrunk = until(lambda: ranks(training), lambda seen: len(seen) == 2)
    shrunk_world = training.world

    gate.open()
    user.until_phase(training, "succeeded")
    user.until_settled(training)
    return {
        "before": before,
        "asked_up": plain(asked_up),
        "grown": grown,
        "grown_world": plain(grown_world),
        "asked_down": plain(asked_down),
        "shrunk": shrunk,
        "shrunk_world": plain(shrunk_world),
        "logs": sorted(training.logs().splitlines()),
        "exits": user.exits(training),
        "events": [(e["reason"], e["message"]) for e in reversed(training.events())],
    }


@story
def a_rank_that_was_dropped_comes_back_as_a_new_one(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("comes-back", up(gate.wait), size=(1, 2, 2))
    training.wait_until_target_world(timeout=15)
    training.scale(1)
    until(lambda: ranks(training), lambda seen: len(seen) == 1)
    training.scale(2)
    training.wait_until_target_world(timeout=15)
    training.scale(1)
    until(lambda: ranks(training), lambda seen: len(seen) == 1)
    training.scale(2)
    training.wait_until_target_world(timeout=15)
    back = ranks(training)
    gate.open()
    user.until_phase(training, "succeeded")
    user.until_settled(training)
    counts = {e["message"]: e["count"] for e in training.events() if e["reason"] == "ScaleRequested"}
    return {"back": back, "exits": user.exits(training), "asked": counts}


@story
def a_size_out_of_bounds_is_refused(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("bounds", gate.wait, size=(2, 2, 3))
    targets = (0, 1, 4, 2**32 - 1)
    seen = {
        "by_client": {str(t): outcome(lambda t=t: training.scale(t)) for t in targets},  # type: ignore[misc]
        "by_server": {
            str(t): outcome(lambda t=t: user.client._client.scale_distributed_deployment(training.name, t))  # type: ignore[misc]
            for t in targets
        },
        "negative": outcome(lambda: user.client._client.scale_distributed_deployment(training.name, -1)),
        "world": plain(user.client.get(training.name).distributed["worldSize"]),
    }
    training.delete()
    return seen


@story
def an_ended_run_cannot_be_scaled(user: User) -> Any:
    training = user.deploy("ended", ["true"])
    user.until_phase(training, "succeeded")
    return {
        "by_client": outcome(lambda: training.scale(3)),
        "by_server": outcome(lambda: user.client._client.scale_distributed_deployment(training.name, 3)),
    }


@story
def a_run_of_which_a_rank_has_finished_cannot_be_scaled(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("closing", f'[ "$BASILICA_RANK" = 0 ] || {{ {gate.wait}; }}', size=(1, 2, 3))
    until(lambda: ranks(training), lambda seen: (0, "Succeeded") in seen)
    refused = outcome(lambda: training.scale(3))
    gate.open()
    user.until_phase(training, "succeeded")
    return refused
