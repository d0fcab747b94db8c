"""The client of the fork server, which it keeps warm and replaces on death. Supervisors do not depend on it."""

import asyncio
import json
import os
import socket
import subprocess
from pathlib import Path

from basilica.core.errors import RuntimeUnavailable
from basilica.machine import files
from basilica.runtimes.local import supervisor
from basilica.runtimes.local.task import StartReply, StartRequest

ANSWER_WITHIN_S = 60.0
EXIT_WITHIN_S = 5.0


class ForkServer:
    """Starts ranks through the fork server. `descriptors` is the soft limit of open files that ranks get."""

    def __init__(self, *, python: str, complaints: Path, descriptors: int) -> None:
        self._descriptors = descriptors
        self._python = python
        self._complaints = complaints
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        async with self._turn:
            self._spawn()

    async def close(self) -> None:
        async with self._turn:
            await self._let_go()

    async def start_ranks(self, request: StartRequest) -> StartReply:
        """Start ranks. A request whose answer was lost is sent again: claims keep ranks from starting twice."""
        body = json.dumps(request).encode()
        message = len(body).to_bytes(8, "big") + body
        async with self._turn:
            for _ in range(2):
                try:
                    async with asyncio.timeout(ANSWER_WITHIN_S):
                        return await self._ask(message)
                except (ConnectionError, EOFError, TimeoutError):
                    await self._let_go()
                except BaseException:
                    await asyncio.shield(self._let_go())  # half a message may be in the socket: start afresh
                    raise
        raise RuntimeUnavailable(f"the fork server does not answer; see {self._complaints}")

    async def _ask(self, message: bytes) -> StartReply:
        control = self._control or self._spawn()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(control, message)
        head = await self._receive(control, 8)
        reply: StartReply = json.loads(await self._receive(control, int.from_bytes(head, "big")))
        return reply

    async def _receive(self, control: socket.socket, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < size:
            part = await loop.sock_recv(control, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs, files.appending(str(self._complaints)) as complaints:
                self._process = subprocess.Popen(
                    [self._python, "-I", "-S", "-X", "utf8", supervisor.__file__, str(self._descriptors)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
                    start_new_session=True,  # a Ctrl-C at the server's terminal must not reach it
                )
        except OSError as error:
            ours.close()
            raise RuntimeUnavailable(f"cannot start the fork server: {error}") from error
        ours.setblocking(False)
        self._control = ours
        return ours

    async def _let_go(self) -> None:
        """Close the socket, which makes the fork server exit, and reap it so that no zombie stays."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(_wait_or_kill, process)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(EXIT_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()  # supervisors do not depend on it
        process.wait()
