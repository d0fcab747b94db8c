"""What else the client can ask of a server."""

import socket
from typing import Any

from tests.e2e.official.published import User, basilica, outcome, plain, story

POLL_SECONDS = 5  # the client's longest pause in most waits


@story
def the_server_is_healthy(user: User) -> Any:
    health = user.client.health_check()
    anonymous = basilica.BasilicaClient(base_url=user.url + "/", api_key="bsk_wrong").health_check()
    return {
        "status": [health.status, anonymous.status],
        "version": health.version,
        "validators": [health.healthy_validators, health.total_validators],
    }


@story
def nothing_is_charged(user: User) -> Any:
    client = user.client
    return {"balance": plain(client.get_balance()), "usage": plain(client.list_usage_history(limit=5, offset=2))}


@story
def nothing_is_published(user: User) -> Any:
    client = user.client
    name = user.deploy("private", ["true"]).name
    status = client._client.get_share_token_status(name)
    return {
        "token": status.exists,
        "make_token": outcome(lambda: client._client.regenerate_share_token(name)),
        "revoke_token": client._client.delete_share_token(name).revoked,
        "enrolled": client.get_enrollment_status(name).public_metadata,
        "enroll": outcome(lambda: client.enroll_metadata(name, enabled=True)),
        "unenroll": client.enroll_metadata(name, enabled=False).public_metadata,
        "metadata": outcome(lambda: client.get_public_deployment_metadata(name)),
        "of_missing": outcome(lambda: client.get_enrollment_status("missing")),
    }


@story
def an_idle_connection_outlives_the_pause_between_two_looks(user: User) -> Any:
    host, port = user.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=POLL_SECONDS + 2) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer, closed = b"", True
        try:
            while part := connection.recv(4096):
                answer += part
        except TimeoutError:
            closed = False
    return {"answer": answer[:15].decode(), "closed": closed}
