"""A container as a process of this machine, or as a puppet that the test moves.

A container ends when its first process does, and everything that was started in it ends with it, wherever it has
hidden: each process carries the container's mark in its environment, and the cluster's.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from basilica_testkube.strays import end_marked

MARK, CLUSTER_MARK = "TESTKUBE_CONTAINER", "TESTKUBE_CLUSTER"
OnExit = Callable[[int], None]


class Body(Protocol):
    """What runs in a container."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    def abandon(self) -> None:
        """End it, and tell nobody."""


class Process:
    """A command in a session of its own, with its output in a file."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], folder: Path, log: Path, on_exit: OnExit) -> None:
        self._mark = f"{MARK}={env[MARK]}".encode()
        self._on_exit: OnExit | None = on_exit
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def terminate(self) -> None:
        if self._popen.returncode is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def abandon(self) -> None:
        self._on_exit = None
        self.kill()
        self._ended()

    def _ended(self) -> None:
        if self._pidfd < 0:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)  # while the dead leader still holds the number of its group
        code = self._popen.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        end_marked(self._mark)
        if self._on_exit is not None:
            self._on_exit(code if code >= 0 else 128 - code)


class Command:
    """A process that was started in a running container, with pipes to it. Its container's end is its own."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        on_exit: Callable[["Command"], None],
        *,
        stdin: bool,
    ) -> None:
        self._on_exit = on_exit
        self.popen = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._pidfd = os.pidfd_open(self.popen.pid)
        loop = asyncio.get_running_loop()
        self.exit_code: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._pidfd, self._ended)

    def abandon(self) -> None:
        if self.popen.returncode is None:
            self.popen.kill()
        self._ended()

    def _ended(self) -> None:
        if self._pidfd < 0:
            return
        code = self.popen.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._on_exit(self)
        if not self.exit_code.done():
            self.exit_code.set_result(code if code >= 0 else 128 - code)


class Puppet:
    """Nothing at all, until the test or a signal ends it."""

    def __init__(self, on_exit: OnExit, *, deaf: bool = False) -> None:
        self._on_exit: OnExit | None = on_exit
        self._deaf = deaf

    def end(self, code: int) -> None:
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None:
            on_exit(code)

    def terminate(self) -> None:
        if not self._deaf:
            self.end(143)

    def kill(self) -> None:
        self.end(137)

    def abandon(self) -> None:
        self._on_exit = None
