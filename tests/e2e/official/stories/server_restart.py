"""A server that is killed and started again while a client holds on to its run."""

from typing import Any

from tests.e2e.official.published import OLDER, User, after_first_look, outcome, plain, story, until


@story
def a_training_survives_the_death_of_its_server(user: User) -> Any:
    """The test kills the server, lets rank 1 end meanwhile, and starts it again."""
    here = user.directory
    while_away, last = user.gate("rank-1-may-end"), user.gate("all-may-end")
    script = f"""
    echo $$ > '{here}'/pid-$BASILICA_RANK; echo up
    case $BASILICA_RANK in
      0) {last.wait} ;;
      1) {while_away.wait}; echo going; exit 3 ;;
      2) {last.wait}; kill -KILL $$ ;;
    esac"""
    training = user.shell("survivor", script, size=(1, 3, 3))
    training.wait_until_target_world(timeout=15)
    until(lambda: len(list(here.glob("pid-*"))), lambda n: n == 3)
    (here / "deployed").touch()
    down = until(lambda: outcome(training.refresh), lambda seen: "raised" in seen)
    (here / "noticed").touch()
    until((here / "restarted").exists, bool)
    training.wait_until_min_world(timeout=15)
    if OLDER:
        last.open()
        user.until_phase(training, "succeeded")
    else:
        after_first_look(training, last.open)
        training.wait_until_complete(timeout=30)
    user.until_settled(training)
    return {
        "down": down,
        "world": plain(training.world),
        "phase": user.phase(training),
        "exits": user.exits(training),
        "logs": sorted(training.logs().splitlines()),
    }
