"""Requests to the running server of a state directory."""

from pathlib import Path
from typing import Any

import httpx2

from basilica.client import embedded
from basilica.core.errors import BasilicaError
from basilica.machine.places import default_state_dir


class NoServer(BasilicaError):
    pass


def request(state_dir: Path | None, method: str, path: str, **options: Any) -> dict[str, Any]:
    """Send one request to the server; raise its errors and its absence as `BasilicaError` with one sentence."""
    running = embedded.find(state_dir)
    if running is None:
        raise NoServer(f"no server runs on {state_dir or default_state_dir()}: start one with 'basilica serve'")
    try:
        return embedded.request(running.endpoint, method, path, **options)
    except httpx2.TransportError as error:
        raise NoServer(f"the server at {running.url} does not answer: {error}") from error
