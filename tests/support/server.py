"""`basilica` as people run it: a process of its own, found by what it prints, ended by its pid.

Most are forked from a server that has imported everything already; `cli_afresh` starts an interpreter.
"""

import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2

from tests.support.entry import become_basilica

SECONDS = 30.0
Json = dict[str, Any]

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.entry"])


def cli(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = Command([str(a) for a in arguments], env)
    stdout = command.read_until(None)
    return subprocess.CompletedProcess(arguments, command.wait(), stdout, command.stderr)


def cli_afresh(
    *arguments: str | Path, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in an interpreter of its own."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "basilica.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment() | dict(env or {}),
    )


def clean_environment() -> dict[str, str]:
    ours = ("BASILICA_", "XDG_", "COLUMNS", "LINES")  # xdist sets the size of its own terminal
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Command:
    """A running `basilica`."""

    def __init__(
        self, arguments: list[str], env: Mapping[str, str] | None = None, *, descriptors: int | None = None
    ) -> None:
        """`descriptors`: how many it may open, if not as many as we."""
        directory = tempfile.mkdtemp(prefix="basilica-test-")
        weakref.finalize(self, shutil.rmtree, directory)
        self._said = Path(directory) / "stderr"
        self._said.touch()
        self._stdout, theirs = _processes.Pipe(duplex=False)
        given = (arguments, clean_environment() | dict(env or {}), theirs, str(self._said), descriptors)
        self.process = _processes.Process(target=become_basilica, args=given, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    @property
    def stderr(self) -> str:
        return self._said.read_text(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code."""
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, f"{self.pid} has not ended\n{self.stderr}"
        self._stdout.close()
        return self.process.exitcode

    def read_until(self, pattern: bytes | None) -> str:
        """What it printed, up to where the pattern is found, or to the end."""
        text, deadline = b"", time.monotonic() + SECONDS
        while pattern is None or re.search(pattern, text) is None:
            data = _read(self._stdout, deadline)
            if not data:
                break
            text += data
        return text.decode()


class Server(Command):
    """`basilica serve`. `url` and `key_file` are what it printed."""

    def __init__(
        self,
        state_dir: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        descriptors: int | None = None,
    ) -> None:
        super().__init__(
            ["serve", "--port", "0", "--state-dir", str(state_dir), *options], env, descriptors=descriptors
        )
        self.printed = self.read_until(b"API key: .*\n")
        if "API key: " not in self.printed:
            self.kill()
            raise DidNotStart(self.printed + self.stderr)
        self.url = _found(r"listens on (\S+)", self.printed)
        self.key_file = Path(_found(r"API key: (\S+)", self.printed))

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    def client(self, key: str | None = None, *, verify: Any = False) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=SECONDS, trust_env=False, verify=verify)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it had just ended by itself
            self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        if self.running:
            self.signal(signal.SIGTERM)
        return self.wait()


class DidNotStart(Exception):
    """With all that it said."""


def _read(pipe: Connection, deadline: float) -> bytes:
    ready, _, _ = select.select([pipe.fileno()], [], [], max(0.0, deadline - time.monotonic()))
    return os.read(pipe.fileno(), 65536) if ready else b""


@contextmanager
def serving(
    state_dir: Path, *options: str, env: Mapping[str, str] | None = None, descriptors: int | None = None
) -> Iterator[Server]:
    """A server for the time of the block; runs that it still has are deleted, so that no rank is left."""
    server = Server(state_dir, *options, env=env, descriptors=descriptors)
    try:
        yield server
    finally:
        if server.running:
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


def wait_for(client: httpx2.Client, name: str, done: Callable[[Json], bool]) -> Json:
    """Long-poll until the run satisfies `done`."""
    version = -1
    deadline = time.monotonic() + SECONDS
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
