"""What the server refuses, and in which words."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.official.published import User, basilica, in_a_hurry, outcome, story

MISSING = ("missing", "a/b", "a b", "\u00fcml\u00e4ut", "..", "", "A" * 300, "%2e%2e", "a?b=c", "a#b")


@story
@in_a_hurry
def a_wrong_key_opens_nothing(user: User) -> Any:
    training = user.deploy("locked", ["true"])
    user.until_phase(training, "succeeded")
    wrong = user.with_key("bsk_wrong").client
    empty = user.with_key("").client
    return {
        "calls": {
            "list": outcome(wrong.list),
            "get": outcome(lambda: wrong.get(training.name)),
            "deploy": outcome(lambda: user.with_key("bsk_wrong").deploy("locked-out", ["true"])),
            "delete": outcome(lambda: wrong.delete_deployment(training.name)),
            "events": outcome(lambda: wrong.get_deployment_events(training.name)),
            "scale": outcome(lambda: wrong._client.scale_distributed_deployment(training.name, 1)),
            "balance": outcome(wrong.get_balance),
        },
        "empty": outcome(empty.list),
        "logs": wrong.get_deployment_logs(training.name),
        "still_there": user.client.get(training.name).phase,
    }


@story
def a_missing_name_is_not_found(user: User) -> Any:
    client = user.client
    return {
        "get": {name: outcome(lambda n=name: client.get(n)) for name in MISSING},  # type: ignore[misc]
        "get_by_name": outcome(lambda: client.get_by_name("missing")),
        "delete": outcome(lambda: client.delete_deployment("missing")),
        "restart": outcome(lambda: client.restart_deployment("missing")),
        "events": outcome(lambda: client.get_deployment_events("missing")),
        "scale": outcome(lambda: client._client.scale_distributed_deployment("missing", 1)),
        "training": outcome(lambda: basilica.DistributedTraining(client, "missing").world),
        "logs": client.get_deployment_logs("missing"),
    }


@story
def bad_requests_are_refused_with_the_field_and_the_problem(user: User) -> Any:
    true = ["true"]
    calls: dict[str, tuple[str, list[str], dict[str, Any]]] = {
        "upper-case name": ("Training", true, {}),
        "name with slash": ("a/b", true, {}),
        "name with space": ("a b", true, {}),
        "unicode name": ("tr\u00e4ning", true, {}),
        "empty name": ("", true, {}),
        "long name": ("n" * 49, true, {}),
        "name with dots": ("..", true, {}),
        "empty command": ("bad", [], {}),
        "blank script": ("bad", ["sh", "-c", "  "], {}),
        "port too large": ("bad", true, {"port": 70000}),
        "port zero": ("bad", true, {"port": 0}),
        "too many gpus": ("bad", true, {"gpu_count": 5000}),
        "no such memory": ("bad", true, {"memory": "lots"}),
        "negative memory": ("bad", true, {"memory": "-1Gi"}),
        "negative cpu": ("bad", true, {"cpu": "-1"}),
        "no cpu": ("bad", true, {"cpu": "0"}),
        "variable without a name": ("bad", true, {"env": {"": "x"}}),
        "variable with equals sign": ("bad", true, {"env": {"A=B": "x"}}),
        "secret with NUL": ("bad", true, {"env": {"TOKEN": "s3cr\0t"}}),
        "argument with NUL": ("bad", true, {"args": ["a\0b"]}),
        "long script": ("bad", ["sh", "-c", ": " + "x" * (2 << 20)], {}),
        "no gpu memory": ("bad", true, {"min_gpu_memory_gb": 0}),
    }
    refused = {
        what: outcome(lambda c=call: user.deploy(c[0], c[1], **c[2]).name)  # type: ignore[misc]
        for what, call in calls.items()
    }
    unsent = {
        "negative port": outcome(lambda: user.deploy("bad", true, port=-1)),
        "negative gpus": outcome(lambda: user.deploy("bad", true, gpu_count=-1)),
        "negative ttl": outcome(lambda: user.deploy("bad", true, ttl_seconds=-1)),
        "world size": outcome(lambda: user.deploy("bad", true, size=(0, 1, 1))),
    }
    after = [d for d in user.client.list() if d.friendly_name in {call[0] for call in calls.values()}]
    return {"refused": refused, "unsent": unsent, "made": len(after)}


@story
def more_ranks_than_a_user_may_have_are_refused(user: User) -> Any:
    return outcome(lambda: user.deploy("enormous", ["true"], size=(1, 5000, 5000)))


@story
def a_request_that_is_too_large_is_refused(user: User) -> Any:
    return outcome(lambda: user.deploy("too-large", ["true"], env={"LARGE": "x" * (10 << 20)}))


@story
def odd_but_good_requests_are_accepted(user: User) -> Any:
    good: dict[str, dict[str, Any]] = {
        "no-gpu": {"gpu_count": 0},
        "no-image": {"image": ""},
        "no-ttl": {"ttl_seconds": None},
        "ttl-zero": {"ttl_seconds": 0},
        "no-billing": {"enable_billing": False},
        "rendezvous-static": {"rendezvous_backend": "static"},
        "rendezvous-c10d": {"rendezvous_backend": "c10d", "topology_spread": "pack"},
        "providers": {"provider_filter": basilica.ProviderFilter(include=["cyan"], exclude=["opal"])},
        "n" * 48: {"cpu": "500m", "memory": "512Mi"},
    }

    def run(name: str) -> int:
        training = user.deploy(name, ["true"], size=(1, 1, 1), **good[name])
        user.until_phase(training, "succeeded")
        return int(training.world.ready)

    with ThreadPoolExecutor() as pool:
        return dict(zip(good, pool.map(run, good), strict=True))
