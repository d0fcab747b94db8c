"""What else the published client can ask of a server."""

from typing import Any

from basilica import __version__


def test_the_server_is_healthy(seen: Any) -> None:
    """With a wrong key too, and with a base URL that ends with a slash: the client does not trim it."""
    assert seen == {"status": ["healthy", "healthy"], "version": __version__, "validators": [1, 1]}


def test_nothing_is_charged(seen: Any) -> None:
    assert seen["balance"]["balance"] == "0"
    assert seen["usage"] == {"rentals": [], "total_count": 0}


def test_nothing_is_published(seen: Any) -> None:
    assert (seen["token"], seen["revoke_token"], seen["enrolled"], seen["unenroll"]) == (False, False, False, False)
    assert seen["make_token"]["raised"] == "RuntimeError"
    assert seen["make_token"]["text"].startswith("Conflict: this server publishes nothing")
    assert seen["enroll"]["raised"] == "PermissionError"
    assert seen["metadata"]["raised"] == seen["of_missing"]["raised"] == "KeyError"


def test_an_idle_connection_outlives_the_pause_between_two_looks(seen: Any) -> None:
    """The client looks every 5 s over a connection that it keeps, and gives up on a run if that is being closed."""
    assert seen == {"answer": "HTTP/1.1 200 OK", "closed": False}
