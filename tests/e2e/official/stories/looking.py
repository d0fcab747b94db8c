"""Reading what the server knows: listings, events, logs; and deleting."""

from typing import Any

from tests.e2e.official.published import OLDER, User, heard_warnings, in_a_hurry, outcome, plain, story, until


@story
def a_running_deployment_looks_like_one(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("looks", gate.wait, image="img:1")
    training.wait_until_target_world(timeout=15)
    found = user.client.get(training.name)
    status = found.status()
    seen = {
        "names": [found.name, found.friendly_name, training.name],
        "owner": [found.user_id, found.namespace, training.namespace],
        "state": [found.state, found.phase, status.is_ready, status.is_failed, status.is_pending],
        "replicas": [status.replicas_ready, status.replicas_desired],
        "image": found.image,
        "url": found.url,
        "created": found.created_at,
        "ranks": plain(training.ranks),
        "transport": found.distributed["transport"],
        "exits": found.distributed.get("rankExits", []) if OLDER else plain(training.rank_exits),
        "metrics": plain(training.metrics()),
        "rendezvous": training.rendezvous_endpoint,
    }
    gate.open()
    return seen


@story
def each_user_has_a_listing_of_their_own(user: User) -> Any:
    gate = user.gate("go")
    alice, bob = (user.with_key(key) for key in user.others.values())
    first = alice.shell("first", gate.wait)
    second = alice.shell("second", gate.wait)
    seen = {
        "instances": [first.name, second.name],
        "listed": [(d.name, d.friendly_name, d.state, d.phase) for d in alice.client.list()],
        "total": alice.client.list_deployments().total,
        "by_name": alice.client.get_by_name("first").name,
        "by_friendly_name": alice.client.get("first").name,
        "others": plain(bob.client.list()),
        "foreign": [
            outcome(lambda: bob.client.get(first.name)),
            outcome(lambda: bob.client.get_by_name("first")),
            outcome(lambda: bob.client.delete_deployment(first.name)),
            outcome(lambda: bob.client._client.scale_distributed_deployment(first.name, 1)),
            outcome(lambda: bob.client.get_deployment_events(first.name)),
        ],
        "same_name": bob.deploy("first", ["true"]).name,
    }
    gate.open()
    return seen


@story
def events_tell_the_life_of_a_run(user: User) -> Any:
    training = user.deploy("events", ["true"])
    user.until_phase(training, "succeeded")
    events = training.events()
    newest = user.client.get_deployment_events(training.name, limit=1)["events"]
    return {"events": events, "newest": newest}


@story
def logs_are_read_and_followed(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("logs", f"echo one; echo two; {gate.wait}; echo three; printf ' \u00e9nd'")
    both = until(lambda: sorted(training.logs().splitlines()), lambda seen: len(seen) == 4)
    seen = {
        "running": both,
        "tail": sorted(training.logs(tail=1).splitlines()),
        "tail_none": training.logs(tail=0),
    }
    gate.open()
    seen["followed"] = sorted(training.logs(follow=True).splitlines())
    user.until_phase(training, "succeeded")
    seen["followed_afterwards"] = sorted(training.logs(follow=True).splitlines())
    seen["followed_tail"] = sorted(training.logs(follow=True, tail=1).splitlines())
    seen["streamed"] = sorted(line for _, line in training.stream_logs())
    with heard_warnings() as heard:
        training.logs(rank=1)
    seen["warned"] = heard
    return seen


@story
def the_log_of_a_single_rank_is_as_it_was_written(user: User) -> Any:
    training = user.shell("single", "echo one; echo two >&2", size=(1, 1, 1))
    return training.logs(follow=True)


@story
@in_a_hurry
def a_deleted_run_is_gone(user: User) -> Any:
    training = user.deploy("deleted", ["sleep", "600"])
    answer = user.client.delete_deployment(training.name)
    return {
        "answer": [answer.instance_name, answer.state, answer.message],
        "name": training.name,
        "get": outcome(lambda: user.client.get(training.name)),
        "get_by_name": outcome(lambda: user.client.get_by_name("deleted")),
        "refresh": outcome(training.refresh),
        "again": outcome(training.delete),
        "logs": training.logs(),
    }


@story
def a_rank_that_takes_its_time_delays_its_deletion(user: User) -> Any:
    gate = user.gate("go")
    stopping = user.directory / "stopping"
    script = f"trap 'touch {stopping}; {gate.wait}; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    training = user.shell("slow-to-go", script, size=(1, 1, 1))
    until(training.logs, lambda text: text == "up\n")
    answer = user.client.delete_deployment(training.name)
    meanwhile = user.client.get(training.name).state
    again = user.client.delete_deployment(training.name).state
    told = stopping.exists()
    gate.open()
    gone = until(lambda: outcome(training.refresh), lambda seen: "raised" in seen)
    return {"answer": answer.state, "meanwhile": meanwhile, "again": again, "told": told, "gone": gone["raised"]}
