"""How ranks end, and what is told about it."""

from typing import Any

from tests.e2e.official.published import OLDER, User, basilica, plain, story, until

EVERY_WAY = """
case $BASILICA_RANK in
  1) exit 3 ;;
  2) exit 137 ;;
  3) kill -KILL $$ ;;
  4) kill -SEGV $$ ;;
  5) exec no-such-program ;;
esac
"""


@story
def every_way_to_end_is_told_apart(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("every-way", EVERY_WAY + gate.wait, size=(1, 6, 6))

    def phases() -> list[str]:
        training.refresh()
        return [r.phase for r in training.ranks]

    running = until(phases, lambda seen: seen == ["Running"] + ["Failed"] * 5)
    meanwhile = {
        "phase": user.phase(training),
        "exits": [] if OLDER else plain(training.rank_exits),
        "world": plain(training.world),
    }
    gate.open()
    user.until_phase(training, "succeeded")
    user.until_settled(training)
    lost = [e["message"] for e in reversed(training.events()) if e["reason"] == "RankLost"]
    return {"running": running, "meanwhile": meanwhile, "exits": user.exits(training), "lost": lost}


@story
def one_failure_ends_a_gang_that_needs_everybody(user: User) -> Any:
    gate = user.gate("fail")
    script = f'{gate.wait}; [ "$BASILICA_RANK" = 1 ] && exit 3; exec sleep 600'
    training = user.shell("gang", script, size=(3, 3, 3))
    gate.open()
    user.until_phase(training, "failed")
    user.until_settled(training)
    deployment = user.client.get(training.name)
    return {
        "exits": user.exits(training),
        "state": deployment.state,
        "message": deployment.message,
        "status": deployment.status().is_failed,
        "world": plain(training.world),
        "warnings": [e["reason"] for e in training.events() if e["type"] == "Warning"],
    }


@story
def restarts_are_counted(user: User) -> Any:
    """The published client cannot ask for restarts: the run was made by somebody who can."""
    body = {
        "instanceName": "restarts",
        "distributed": {
            "worldSize": {"min": 2, "target": 2, "max": 2},
            "command": '[ "$BASILICA_RANK$BASILICA_ATTEMPT" != 10 ] || exit 9',
            "maxRestarts": 2,
        },
    }
    name = user.curl("POST", "/deployments", body)["instanceName"]
    training = basilica.DistributedTraining(user.client, name)
    user.until_phase(training, "succeeded")
    user.until_settled(training)
    return {
        "exits": user.exits(training),
        "ranks": [(r.rank, r.phase, r.restarts) for r in training.ranks],
        "metrics": training.metrics().rank_restarts_total,
        "reasons": [e["reason"] for e in training.events() if e["reason"].startswith("Rank")],
    }
