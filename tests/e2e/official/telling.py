"""A process of the published client that tells stories to the tests."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[3]

# A test double of torchrun: shows how it was called, waits for $GATE if there is one, and runs the script.
TORCHRUN = """#!/bin/sh
echo "torchrun $*"
[ -z "$GATE" ] || until [ -e "$GATE" ]; do sleep 0.1; done
for script; do :; done
exec python "$script"
"""


class ControlPlane(Protocol):
    """Whom stories are told to: a URL and keys, and a life that ends and begins again."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...

    def key_of(self, user: str) -> str: ...

    def kill(self) -> None: ...

    def start_again(self) -> None: ...


class Telling:
    """A client process that tells stories; answers are read as they come."""

    def __init__(
        self, version: str, server: ControlPlane, stories: Sequence[str], directory: Path, *, at_once: int = 16
    ) -> None:
        python = interpreter(version)
        doubles = directory / "bin"
        doubles.mkdir()
        torchrun = doubles / "torchrun"
        torchrun.write_text(TORCHRUN)
        torchrun.chmod(0o755)
        self._log = directory / "client.log"
        ask = {
            "version": version,
            "url": server.url,
            "key": server.key,
            "others": {user: server.key_of(user) for user in ("alice", "bob")},
            "directory": str(directory),
            "torchrun_path": f"{doubles}:{python.parent}:{os.environ['PATH']}",
            "stories": list(stories),
            "at_once": at_once,
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "tests.e2e.official.driver"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_client_environment(server),
                text=True,
            )
        self._seen: dict[str, dict[str, Any]] = {}
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            json.dump(ask, stdin)

    def seen(self, story: str) -> Any:
        """What the story saw, as soon as it has been told."""
        assert self._process.stdout is not None
        while story not in self._seen:
            line = self._process.stdout.readline()
            assert line, f"the client ended before it told {story}:\n{self._log.read_text()}"
            told = json.loads(line)
            self._seen[told["name"]] = told
        told = self._seen[story]
        if "error" in told:
            pytest.fail(f"the story could not be told:\n{told['error']}", pytrace=False)
        return told["seen"]

    def close(self) -> None:
        with self._process as process:
            process.kill()


def interpreter(version: str) -> Path:
    """The Python of a published client's environment."""
    venv = Path(".venvs") / f"official-{version}"
    if not (ROOT / venv / ".installed").exists():
        pytest.fail(f"the published client {version} is not installed: run 'make {venv}/.installed'", pytrace=False)
    return ROOT / venv / "bin" / "python"


def _client_environment(server: ControlPlane) -> dict[str, str]:
    """Nothing of ours, so that `basilica` is the published client; and where `BasilicaClient()` finds the server."""
    ours = ("BASILICA_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": server.key}
