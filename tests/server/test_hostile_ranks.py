"""One user's files stop nobody: a real server, beside a rank that puts FIFOs in the place of its files."""

from pathlib import Path

import httpx2

from tests.support.server import Json, Server, run_request, serving, wait_for

REPLACES = """
run=$(dirname "$BASILICA_CHECKPOINT_DIR")
for file in "$run/rank-0/0.log" "$run/rank-0/0.error" "$run/results/0.json" "$run/ports.json"; do
    rm -f "$file"; mkfifo "$file"
done
exit 9
"""
FIFO = "is a FIFO, not a regular file"


def test_a_server_goes_on_is_killed_starts_again_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    server = Server(tmp_path / "state")
    try:
        with server.client() as ann:
            ended = outcome(ann, "bad", REPLACES)
            assert [exit["exitCode"] for exit in ended["distributed"]["rankExits"]] == [9]
            check(ann)
    finally:
        server.kill()
    with serving(tmp_path / "state") as server:
        with server.client() as ann:
            check(ann)
            assert outcome(ann, "good", "echo fine")["phase"] == "succeeded"
            assert ann.delete("/deployments/bad", params={"wait": 20}).status_code < 300
        assert server.stop() == 0


def outcome(ann: httpx2.Client, name: str, script: str) -> Json:
    answer = ann.post("/deployments", json=run_request(name, script))
    assert answer.status_code == 201, answer.text
    return wait_for(ann, name, lambda run: run["phase"] in ("succeeded", "failed"))


def check(ann: httpx2.Client) -> None:
    """All that can be asked about the run is answered, and names what is wrong."""
    assert ann.get("/health").status_code == 200
    for query in ("", "?tail=5", "?follow=true"):
        assert f"0.log {FIFO}" in ann.get(f"/deployments/bad/logs{query}").text
    assert ann.get("/deployments/bad/results").json() == {"results": {}, "problems": {"0": FIFO}}
    assert "UnusableFile" in ann.get("/deployments/bad/events").text
    assert ann.get("/deployments/bad/why").status_code == 200
