"""`basilica serve` as people run it: a process of its own, found by what it prints, ended by its pid."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 30.0
BASILICA = [sys.executable, "-m", "basilica.cli.main"]
Json = dict[str, Any]


def cli(
    *arguments: str | Path, env: Mapping[str, str] | None = None, preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*BASILICA, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment() | dict(env or {}),
        preexec_fn=preexec_fn,
    )


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("BASILICA_", "XDG_"))}


class Server:
    """A running server. `url` and `key_file` are what it printed."""

    def __init__(self, state_dir: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        self.state_dir = state_dir
        self.stderr_file = state_dir.with_name(state_dir.name + ".stderr")
        with self.stderr_file.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*BASILICA, "serve", "--port", "0", "--state-dir", str(state_dir), *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=clean_environment() | dict(env or {}),
            )
        self.printed = self._read_until(b"API key: .*\n")
        self.url = _found(r"listens on (\S+)", self.printed)
        self.key_file = Path(_found(r"API key: (\S+)", self.printed))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text(errors="replace")

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    def client(self, key: str | None = None, *, verify: Any = True) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, verify=verify)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        self._close()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        self._close()
        return code

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read_until(self, pattern: bytes) -> str:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        text, deadline = b"", time.monotonic() + START_SECONDS
        while re.search(pattern, text) is None:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 4096) if ready else b""
            if not data:
                self.kill()
                raise AssertionError(f"the server did not start: {text.decode()}\n{self.stderr}")
            text += data
        return text.decode()


@contextmanager
def serving(state_dir: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server for the time of the block; runs that it still has are deleted, so that no rank is left."""
    server = Server(state_dir, *options, env=env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            _delete_all(server)
        server.stop()


def _delete_all(server: Server) -> None:
    if server.url.startswith("http:"):
        with server.client() as client:
            for run in client.get("/deployments").json().get("deployments", []):
                client.delete(f"/deployments/{run['instanceName']}", params={"wait": 20})


def run_request(name: str, script: str, *, target: int = 1, **more: Any) -> Json:
    """A create request for a script of /bin/sh."""
    size = {"min": 1, "target": target, "max": max(target, 4)}
    gang = {"worldSize": size, "command": script, "graceSeconds": 1}
    return {"instanceName": name, "distributed": gang} | more


def wait_for(client: httpx.Client, name: str, done: Callable[[Json], bool]) -> Json:
    """Long-poll until the run satisfies `done`."""
    version = -1
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        answer = client.get(f"/deployments/{name}/watch", params={"since": max(version, 0), "wait": 10})
        answer.raise_for_status()
        body: Json = answer.json()
        if done(body):
            return body
        version = body["version"]
    raise AssertionError(f"{name} is still {body}")


def ended(body: Json) -> bool:
    return bool(body["distributed"]["settled"])


def phase_is(*phases: str) -> Callable[[Json], bool]:
    return lambda body: body["phase"] in phases


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]
