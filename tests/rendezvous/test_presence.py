"""Heartbeats: what a rendezvous publishes of the agents that it hears from, and what that costs."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from basilica.rendezvous.presence import FORGET_AFTER_S, MISSED, Heard, Presence, load_heard
from tests.rendezvous.harness import Client, OurServer, free_port, service_process

KEY = "/v2/keys/basilica/heard"


def published(client: Client) -> dict[str, Any]:
    answer = client.ask("GET", f"{KEY}?recursive=true")
    if answer.status == 404:
        return {}
    nodes = answer.json["node"].get("nodes") or ()
    return {node["key"].rpartition("/")[2]: json.loads(node["value"]) for node in nodes}


def index_of(client: Client) -> int:
    return int(client.ask("GET", KEY).headers["x-etcd-index"])


def test_only_changes_are_published() -> None:
    presence = Presence()
    assert presence.heard("pod-3", 5.0, None, 100.0) == {"/basilica/heard/pod-3": '{"gap": null}'}
    for moment in range(101, 110):
        assert presence.heard("pod-3", 5.0, 1.0, float(moment)) == {}
        assert presence.fallen_silent(float(moment)) == {}
    assert presence.next_due() == 109.0 + MISSED * 5.0
    assert presence.fallen_silent(109.0 + MISSED * 5.0) == {"/basilica/heard/pod-3": '{"silent": 12.5}'}
    assert presence.fallen_silent(1000.0) == {}
    assert presence.heard("pod-3", 5.0, 40.0, 1001.0) == {"/basilica/heard/pod-3": '{"gap": 40.0}'}


def test_an_agent_that_never_comes_back_is_forgotten() -> None:
    presence = Presence()
    presence.heard("pod-3", 5.0, None, 0.0)
    presence.fallen_silent(20.0)
    assert presence.next_due() == FORGET_AFTER_S
    assert presence.fallen_silent(FORGET_AFTER_S) == {"/basilica/heard/pod-3": None}
    assert presence.next_due() is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"gap": null}', Heard()),
        ('{"gap": 3.5}', Heard(gap=3.5)),
        ('{"silent": 12.5}', Heard(silent=12.5)),
        ("", None),
        ("[1]", None),
        ('{"silent": -1}', None),
        ('{"silent": "long"}', None),
        ('{"silent": NaN}', None),
    ],
)
def test_what_a_rank_may_have_written_there_is_read_with_care(text: str, found: Heard | None) -> None:
    assert load_heard(text) == found


def test_a_rank_that_falls_silent_is_published_and_so_is_its_return(ours: OurServer) -> None:
    ours.fresh(3)
    client = Client(ours.address)
    try:
        assert client.ask("PUT", "/basilica/heartbeats/7", "every=0.1").status == 204
        assert published(client) == {"7": {"gap": None}}
        waiting = client.ask("GET", f"{KEY}/7?wait=true&waitIndex={index_of(client) + 1}")
        assert json.loads(waiting.json["node"]["value"])["silent"] >= 0.25
        assert client.ask("PUT", "/basilica/heartbeats/7", "every=60&gap=9.5").status == 204
        assert published(client) == {"7": {"gap": 9.5}}
    finally:
        client.close()


def test_heartbeats_leave_neither_the_index_nor_the_journal_changed(ours: OurServer) -> None:
    """Whoever waits in the keyspace has its history: a thousand events, which heartbeats must not fill."""
    ours.fresh(3)
    client = Client(ours.address)
    try:
        client.ask("PUT", "/basilica/heartbeats/0", "every=60")
        assert ours.server is not None
        before, size = index_of(client), ours.server.journal._size
        for _ in range(1500):
            assert client.ask("PUT", "/basilica/heartbeats/0", "every=60&gap=0.1").status == 204
        assert (index_of(client), ours.server.journal._size) == (before, size)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("a/b", "every=5"),
        ("-1", "every=5"),
        ("x" * 64, "every=5"),
        ("\u0663", "every=5"),
        ("1", ""),
        ("1", "every=0"),
        ("1", "every=soon"),
        ("1", "every=5&gap=-1"),
        ("1", "every=5&gap=inf"),
    ],
)
def test_what_is_no_heartbeat_is_refused(ours: OurServer, target: str, body: str) -> None:
    client = Client(ours.address)
    try:
        assert client.ask("PUT", f"/basilica/heartbeats/{quote(target)}", body).status == 400
        assert client.ask("GET", "/basilica/heartbeats/1").status == 405
    finally:
        client.close()


def test_a_rendezvous_that_starts_has_heard_nobody_yet(tmp_path: Path) -> None:
    port = free_port()
    command = ("--port", str(port))
    for attempt in range(2):
        with service_process(tmp_path, *command) as process:
            client = Client(("127.0.0.1", port))
            try:
                assert published(client) == {}
                assert client.ask("PUT", "/basilica/heartbeats/1", "every=60").status == 204
                assert published(client) == {"1": {"gap": None}}
                if attempt == 0:
                    process.kill()
                    process.wait()
            finally:
                client.close()
