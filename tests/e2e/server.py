"""A server that is killed and started again where it was, and that must leave nothing behind."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.server import Server, cli


class LastingServer:
    """`basilica serve` on one port and one state directory, however often it is killed."""

    def __init__(self, state_dir: Path, env: Mapping[str, str] | None = None) -> None:
        self._server: Server | None = Server(state_dir, env=env)
        self._state_dir, self._env = state_dir, env
        self.url, self.key = self._server.url, self._server.key
        self._keys_of_others: dict[str, str] = {}

    def kill(self) -> None:
        """As by the kernel's out-of-memory killer: no chance to tidy up."""
        assert self._server is not None
        self._server.kill()
        self._server = None

    def start_again(self) -> None:
        self._server = Server(self._state_dir, "--port", self.url.rpartition(":")[2], env=self._env)
        assert (self._server.url, self._server.key) == (self.url, self.key)

    def stop(self) -> None:
        """By SIGTERM; what it knows of its runs stays."""
        assert self._server is not None
        assert self._server.stop() == 0, self._server.stderr

    def key_of(self, user: str) -> str:
        """An API key of somebody else than the user that the server makes itself."""
        if user not in self._keys_of_others:
            made = cli("keys", "create", "--user", user, "--state-dir", self._state_dir)
            assert made.returncode == 0, made.stderr
            self._keys_of_others[user] = made.stdout.strip()
        return self._keys_of_others[user]

    def close(self) -> None:
        """End every run, stop the server by SIGTERM, and insist that no process of theirs is left."""
        try:
            if self._server is None:
                self.start_again()
            assert self._server is not None
            for key in (self.key, *self._keys_of_others.values()):
                with self._server.client(key) as client:
                    for run in client.get("/deployments").json()["deployments"]:
                        client.delete(f"/deployments/{run['instanceName']}", params={"wait": 15})
            code = self._server.stop()
        finally:
            left = processes_of(self._state_dir)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert code == 0, self._server.stderr
        assert not left, f"outlived their runs and the server: {left}"


def processes_of(state_dir: Path) -> dict[int, str]:
    """Every process that has the state directory in its environment or an open file in it, with its command line.

    Ranks have both; supervisors and the fork server write their complaints there.
    """
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _belongs(entry, os.fsencode(state_dir)):
            found[int(entry.name)] = _read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace")
    return found


def _belongs(process: Path, state_dir: bytes) -> bool:
    if state_dir in _read(process / "environ"):
        return True
    try:
        return any(os.fsencode(os.readlink(fd)).startswith(state_dir) for fd in (process / "fd").iterdir())
    except OSError:
        return False  # gone meanwhile, or not ours


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def wait_for(so: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Until something is so of which nobody tells: a file of a rank's, the end of somebody else's process."""
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
