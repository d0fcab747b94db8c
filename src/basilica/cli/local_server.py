"""Talking to the server of a state directory, found by the note that it leaves there."""

import json
from pathlib import Path
from typing import Any

import httpx

from basilica.core.errors import BasilicaError
from basilica.wiring import default_state_dir


class NoServer(BasilicaError):
    pass


def request(state_dir: Path | None, method: str, path: str, **options: Any) -> dict[str, Any]:
    """One call to the server; its errors and its absence are told in a sentence."""
    directory = state_dir or default_state_dir()
    try:
        note = json.loads((directory / "server.json").read_text())
        key = Path(note["keyFile"]).read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.request(method, note["url"] + path, headers=headers, timeout=60, trust_env=False, **options)
    except (OSError, httpx.TransportError) as error:
        raise NoServer(f"no server runs on {directory}: start one with 'basilica serve' ({error})") from error
    body: dict[str, Any] = answer.json()
    if answer.is_error:
        raise BasilicaError(body["error"]["message"])
    return body
