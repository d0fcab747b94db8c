"""Talking to the server of a state directory, found by the note that it leaves there."""

import json
import ssl
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
        with httpx.Client(headers=headers, timeout=60, trust_env=False, verify=_trust(note)) as client:
            answer = client.request(method, note["url"] + path, **options)
        body: dict[str, Any] = answer.json()
        problem = body["error"]["message"] if answer.is_error else None
    except (OSError, httpx.TransportError, ValueError, LookupError, TypeError) as error:
        raise NoServer(f"no server runs on {directory}: start one with 'basilica serve' ({error})") from error
    if problem is not None:
        raise BasilicaError(problem)
    return body


def _trust(note: dict[str, str]) -> ssl.SSLContext | bool:
    """Of a server with TLS, exactly the certificate that it was started with, whatever its name."""
    if "tlsCert" not in note:
        return True
    context = ssl.create_default_context(cafile=note["tlsCert"])
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
