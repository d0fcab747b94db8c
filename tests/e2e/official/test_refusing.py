"""What the server refuses, as the published client raises it."""

import json
from typing import Any

UNKNOWN_KEY = "Authentication error: this API key is not known here, or was revoked."


def test_a_wrong_key_opens_nothing(seen: Any) -> None:
    for call, result in seen["calls"].items():
        assert result["raised"] == "PermissionError", call
        assert result["text"].startswith(UNKNOWN_KEY), call
    assert seen["empty"]["raised"] == "PermissionError"
    assert seen["empty"]["text"].startswith("Authentication error: the Authorization header must read 'Bearer KEY'")
    assert json.loads(seen["logs"])["error"]["code"] == "BASILICA_API_AUTH_ERROR"
    assert seen["still_there"] == "succeeded"


def test_a_missing_name_is_not_found(seen: Any) -> None:
    assert len(seen["get"]) == 10
    for name, result in seen["get"].items():
        assert result["raised"] == "DeploymentNotFound", name
    assert seen["get_by_name"]["raised"] == seen["training"]["raised"] == "DeploymentNotFound"
    for call in ("delete", "restart", "events", "scale"):
        assert seen[call]["raised"] == "KeyError"
        assert "Not found: deployment 'missing' not found" in seen[call]["text"]
    assert json.loads(seen["logs"])["error"]["code"] == "BASILICA_API_NOT_FOUND"


def test_bad_requests_are_refused_with_the_field_and_the_problem(seen: Any) -> None:
    fields = {
        "upper-case name": "instanceName: ",
        "name with slash": "instanceName: ",
        "name with space": "instanceName: ",
        "unicode name": "instanceName: ",
        "empty name": "instanceName: ",
        "long name": "instanceName: ",
        "name with dots": "instanceName: ",
        "empty command": "distributed.command: ",
        "blank script": "distributed.command: ",
        "port too large": "port: ",
        "port zero": "port: ",
        "too many gpus": "resources.gpus.count: ",
        "no such memory": "resources.memory: ",
        "negative memory": "resources.memory: ",
        "negative cpu": "resources.cpu: ",
        "no cpu": "resources.cpu: ",
        "variable without a name": "env: ",
        "variable with equals sign": "env: ",
        "secret with NUL": "env.TOKEN: ",
        "argument with NUL": "args: ",
        "long script": "distributed.command: ",
        "no gpu memory": "resources.gpus.minGpuMemoryGb: ",
    }
    assert seen["refused"].keys() == fields.keys()
    for what, field in fields.items():
        refused = seen["refused"][what]
        assert refused.get("raised") == "ValueError", (what, refused)
        assert refused["text"].startswith(field), (what, refused)
    assert "try 'training'" in seen["refused"]["upper-case name"]["text"]
    assert "s3cr" not in seen["refused"]["secret with NUL"]["text"]
    assert seen["made"] == 0
    raised = {what: result.get("raised") for what, result in seen["unsent"].items()}
    assert raised == {
        "negative port": "ValueError",
        "negative gpus": "ValueError",
        "negative ttl": "ValueError",
        "world size": "WorldSizeOutOfBounds",
    }


def test_more_ranks_than_a_user_may_have_are_refused(seen: Any) -> None:
    assert seen["raised"] == "PermissionError"
    assert seen["text"].startswith("quota of ranks exceeded: ")
    assert "requested=5000, limit=4096" in seen["text"]


def test_a_request_that_is_too_large_is_refused(seen: Any) -> None:
    assert seen["raised"] == "RuntimeError"
    assert seen["text"].startswith("the body is larger than ")


def test_odd_but_good_requests_are_accepted(seen: Any) -> None:
    assert len(seen) == 9
    assert set(seen.values()) == {1}
