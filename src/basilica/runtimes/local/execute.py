"""Commands beside ranks: their output as it is written, their exit code, and the end of all their processes.

Each command has an attendant, a process that ends it once the server's pipe closes, however the server ended. Processes
that survive a killed attendant are found by their environment, when the run is removed or a server starts.
"""

import asyncio
import codecs
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import closing, suppress
from typing import Literal

from basilica.core import environment as env
from basilica.core.errors import RuntimeUnavailable
from basilica.machine.layout import Layout
from basilica.machine.processes import Watch
from basilica.machine.strays import kill, whose_environment
from basilica.ports import Exited, Output
from basilica.runtimes.local import attendant
from basilica.runtimes.local.background import Spawn
from basilica.runtimes.local.task import CommandTask
from basilica.runtimes.rules import KILL_AGAIN_SECONDS

log = logging.getLogger(__name__)

CHUNK = 1 << 16
CHUNKS_WAITING = 16
END_WITHIN_S = 5.0
_MARKED = f"{env.COMMAND_MARK}=".encode()
_DIRECTORY = f"{env.CHECKPOINT_DIR}="
STOPPED = "the rank that the command ran beside was stopped, and the command with it"


class Commands:
    """The commands beside the ranks of all runs."""

    def __init__(self, layout: Layout, *, python: str, spawn: Spawn) -> None:
        """`spawn` runs the cleanup after a reader has gone."""
        self._layout, self._python, self._spawn = layout, python, spawn
        self._live: dict[tuple[str, int], set[asyncio.Event]] = {}

    async def execute(self, instance: str, rank: int, task: CommandTask) -> AsyncGenerator[Output | Exited, None]:
        """Run a command and yield its output. Closing the generator ends the command."""
        yield Output("stdout", "")
        with suppress(OSError):  # a full disk: the next server to start then finds the leftovers
            self._layout.commands(instance).touch()
        stopped, token = asyncio.Event(), secrets.token_hex(16)
        message = json.dumps({**task, "env": {**task["env"], env.COMMAND_MARK: token}}).encode()
        starting = asyncio.ensure_future(self._start(len(message).to_bytes(8, "big") + message))
        chunks: asyncio.Queue[Output | None] = asyncio.Queue(CHUNKS_WAITING)
        helpers: list[asyncio.Task[None]] = []
        self._live.setdefault((instance, rank), set()).add(stopped)
        try:
            process = await _started(starting)
            assert process.stdout is not None
            assert process.stderr is not None
            readers = [_read("stdout", process.stdout, chunks), _read("stderr", process.stderr, chunks)]
            others = (_hang_up_when(stopped, process), _end_with_attendant(process.pid, token))
            helpers = [asyncio.create_task(work) for work in (*readers, *others)]
            left = len(readers)
            while left:
                chunk = await chunks.get()
                if chunk is None:
                    left -= 1
                else:
                    yield chunk
            code = await process.wait()
            if stopped.is_set():
                raise RuntimeUnavailable(STOPPED)
            if code < 0:
                raise RuntimeUnavailable(f"the process that attends to the command was ended by signal {-code}")
            yield Exited(code)
        finally:
            self._forget(instance, rank, stopped)
            for helper in helpers:
                helper.cancel()
            self._spawn(_finish(starting, token))

    async def _start(self, message: bytes) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(self._python, "-I", "-S", attendant.__file__),
            env={},
            cwd="/",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(message)
        return process

    def _forget(self, instance: str, rank: int, stopped: asyncio.Event) -> None:
        live = self._live[instance, rank]
        live.discard(stopped)
        if not live:
            del self._live[instance, rank]

    def end(self, instance: str, rank: int) -> None:
        """End the commands beside a rank."""
        for stopped in self._live.get((instance, rank), ()):
            stopped.set()

    async def end_all(self, instance: str) -> None:
        """End the commands beside the ranks of a run, including those that an earlier server left."""
        for known, rank in tuple(self._live):
            if known == instance:
                self.end(instance, rank)
        if await asyncio.to_thread(self._layout.commands(instance).exists):
            directory = os.fsencode(f"{_DIRECTORY}{self._layout.checkpoints(instance)}")
            await _kill_commands(lambda environment: directory in environment)

    async def end_leftovers(self) -> None:
        """End the commands of an earlier server that was killed along with their attendants."""
        directory = os.fsencode(f"{_DIRECTORY}{self._layout.runs}/")
        await _kill_commands(lambda environment: any(each.startswith(directory) for each in environment))


async def _started(starting: "asyncio.Future[asyncio.subprocess.Process]") -> asyncio.subprocess.Process:
    try:
        return await asyncio.shield(starting)  # a cancelled start would leave a process behind
    except OSError as error:
        raise RuntimeUnavailable(f"cannot start a process for the command: {error.strerror}") from error


async def _read(
    name: Literal["stdout", "stderr"], stream: asyncio.StreamReader, chunks: asyncio.Queue[Output | None]
) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := await stream.read(CHUNK):
        text = decoder.decode(data)
        if text:
            await chunks.put(Output(name, text))
    rest = decoder.decode(b"", final=True)
    if rest:
        await chunks.put(Output(name, rest))
    await chunks.put(None)


async def _hang_up_when(stopped: asyncio.Event, process: asyncio.subprocess.Process) -> None:
    await stopped.wait()
    _hang_up(process)


async def _end_with_attendant(pid: int, token: str) -> None:
    """Once the attendant has ended, kill the processes that a killed one leaves: they keep the output open."""
    gone = asyncio.Event()
    with suppress(ProcessLookupError), closing(Watch(pid, None, gone.set)):
        await gone.wait()
    await _kill_marked(token)


def _hang_up(process: asyncio.subprocess.Process) -> None:
    """Have the attendant end the command by closing the pipe that it watches."""
    assert process.stdin is not None
    process.stdin.close()


async def _finish(starting: "asyncio.Future[asyncio.subprocess.Process]", token: str) -> None:
    """End a command whose output is no longer read."""
    try:
        process = await starting
    except OSError:
        return
    _hang_up(process)
    try:
        async with asyncio.timeout(END_WITHIN_S):
            code = await process.wait()
    except TimeoutError:
        process.kill()
        code = await process.wait()
    if code < 0:
        await _kill_marked(token)


async def _kill_marked(token: str) -> None:
    mark = f"{env.COMMAND_MARK}={token}".encode()
    await _kill_commands(lambda environment: mark in environment)


async def _kill_commands(fits: Callable[[set[bytes]], bool]) -> None:
    """Kill the commands' processes whose environment fits until none is left, or give up after `END_WITHIN_S`."""

    def is_meant(environment: set[bytes]) -> bool:
        return any(each.startswith(_MARKED) for each in environment) and fits(environment)

    give_up = time.monotonic() + END_WITHIN_S
    while found := await asyncio.to_thread(whose_environment, is_meant):
        kill(found)
        if time.monotonic() > give_up:
            log.warning("processes of commands beside ranks do not end: %s", found)
            return
        await asyncio.sleep(KILL_AGAIN_SECONDS)
