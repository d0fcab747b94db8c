"""A process that has imported torchrun and forks agents: each is spared the second of processor time of the import.

Requests come as JSON lines on stdin: the command line that follows `python -m`, the environment and the log file. A
line on stdout has the pid of the agent, and another one its wait status when it has ended. Agents that are left end
with the zygote's stdin.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = "torch.distributed.run"


class Forked:
    """An agent: the part of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: Future[int] = Future()

    def poll(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        return self.ended.result(timeout)

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            os.kill(self.pid, number)


class Zygote:
    """The handle of the process. It is started by the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._children: dict[int, Forked] = {}
        self._forked: Future[Forked]

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> Forked:
        process = self._process or self._begin()
        assert process.stdin is not None
        self._forked = Future()
        process.stdin.write(json.dumps({"command": list(command), "log": str(log), "env": dict(env)}) + "\n")
        process.stdin.flush()
        return self._forked.result(60)

    def _begin(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.support.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            pid, status = json.loads(line)
            if status is None:
                self._children[pid] = Forked(pid)
                self._forked.set_result(self._children[pid])
            else:
                self._children.pop(pid).ended.set_result(os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def main() -> None:
    __import__(PRELOADED)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if 0 in ready:
            request = _read_line()
            if request is None:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, waker):
                    os.close(descriptor)
                _become(**request)
            children.add(pid)
            _say(pid, None)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _read_line() -> dict[str, Any] | None:
    """A request: its writer waits for the answer before it writes the next."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 20)
        if not data:
            return None
        line += data
    found: dict[str, Any] = json.loads(line)
    return found


def _reap(children: set[int]) -> None:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children.discard(pid)
            _say(pid, status)


def _say(pid: int, status: int | None) -> None:
    os.write(1, json.dumps([pid, status]).encode() + b"\n")


def _become(command: list[str], log: str, env: dict[str, str]) -> NoReturn:
    """Run the module as `python -u -m` does."""
    os.setsid()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
