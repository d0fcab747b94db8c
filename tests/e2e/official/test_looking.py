"""Listings, events and logs of the published client, and deleting."""

import json
import re
from datetime import datetime
from typing import Any


def test_a_running_deployment_looks_like_one(seen: Any, on_a_cluster: bool) -> None:
    name, friendly_name, training_name = seen["names"]
    assert name == training_name
    assert name.startswith("looks-")
    assert friendly_name == "looks"
    assert seen["owner"] == ["local", "u-local", "u-local"]
    assert seen["state"] == ["Active", "ready", True, False, False]
    assert seen["replicas"] == [2, 2]
    assert seen["image"] == "img:1"
    assert seen["url"] == ""
    assert datetime.fromisoformat(seen["created"]).tzinfo is not None
    assert [(r["rank"], r["phase"], r["restarts"]) for r in seen["ranks"]] == [(0, "Running", 0), (1, "Running", 0)]
    for rank, pod in enumerate(r["pod_name"] for r in seen["ranks"]):
        # Every pod of a rank has a name of its own.
        assert re.fullmatch(rf"{name}-{rank}-\d+" if on_a_cluster else f"{name}-{rank}", pod)
    assert seen["transport"]
    assert seen["exits"] == []
    assert (seen["metrics"]["world_ready"], seen["metrics"]["world_target"]) == (2, 2)
    assert seen["rendezvous"] == f"{name}-rendezvous.u-local.svc.cluster.local:2379"


def test_each_user_has_a_listing_of_their_own(seen: Any) -> None:
    first, second = seen["instances"]
    assert seen["listed"] == [[second, "second", "Active", "ready"], [first, "first", "Active", "ready"]]
    assert seen["total"] == 2
    assert seen["by_name"] == seen["by_friendly_name"] == first
    assert seen["others"] == []
    assert [refused["raised"] for refused in seen["foreign"]] == [
        "DeploymentNotFound",
        "DeploymentNotFound",
        "KeyError",
        "KeyError",
        "KeyError",
    ]
    assert seen["same_name"] != first


def test_events_tell_the_life_of_a_run(seen: Any, on_a_cluster: bool) -> None:
    told = [(e["type"], e["reason"], e["count"]) for e in seen["events"]]
    assert told == [
        ("Normal", "Succeeded", 1),
        ("Normal", "WorldReady", 1),
        ("Normal", "MeshReady", 1),
        *([] if on_a_cluster else [("Normal", "ImageIgnored", 1)]),
        ("Normal", "Created", 1),
    ]
    assert all(e["message"] for e in seen["events"])
    times = [datetime.fromisoformat(e["last_timestamp"]) for e in seen["events"]]
    assert times == sorted(times, reverse=True)
    assert seen["newest"] == seen["events"][:1]


def test_logs_are_read_and_followed(seen: Any) -> None:
    def of_both(*lines: str) -> list[str]:
        return sorted(f"{rank}| {line}" for rank in (0, 1) for line in lines)

    everything = of_both("one", "two", "three", " \u00e9nd")
    assert seen["running"] == of_both("one", "two")
    assert seen["tail"] == of_both("two")
    assert seen["tail_none"] == ""
    assert seen["followed"] == seen["followed_afterwards"] == seen["streamed"] == everything
    assert seen["followed_tail"] == of_both(" \u00e9nd")
    assert len(seen["warned"]) == 1


def test_the_log_of_a_single_rank_is_as_it_was_written(seen: Any) -> None:
    assert seen == "one\ntwo\n"


def test_a_deleted_run_is_gone(seen: Any) -> None:
    assert seen["answer"][:2] == [seen["name"], "Deleted"]
    assert [seen[call]["raised"] for call in ("get", "get_by_name", "refresh")] == ["DeploymentNotFound"] * 3
    assert seen["again"]["raised"] == "KeyError"
    assert json.loads(seen["logs"])["error"]["code"] == "BASILICA_API_NOT_FOUND"


def test_a_rank_that_takes_its_time_delays_its_deletion(seen: Any) -> None:
    terminating = dict.fromkeys(("answer", "meanwhile", "again"), "Terminating")
    assert seen == {**terminating, "told": True, "gone": "DeploymentNotFound"}
