"""A command beside a rank: its output as it comes, its exit code, and an end for all that it started."""

import asyncio
import codecs
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from basilica.ports import Exited, Output
from basilica.runtimes.local.orphans import MARK
from basilica.runtimes.local.processes import Watch
from basilica.strays import kill, with_environment

CHUNK = 1 << 16
CHUNKS_WAITING = 16


async def execute(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    spawn: Callable[[Coroutine[Any, Any, object]], None],
) -> AsyncGenerator[Output | Exited, None]:
    """All that it started bears a mark in its environment, and is killed when it ends or the reader goes away.

    `spawn` runs what is left to do after the reader has gone.
    """
    token = secrets.token_hex(16)
    yield Output("stdout", "")
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            env={**env, MARK: token},
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    )
    try:
        process = await asyncio.shield(starting)  # cancelled by itself, it would leave what the command has started
    except asyncio.CancelledError:
        spawn(_abandon(starting, token))
        raise
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        yield Output("stderr", f"cannot execute {argv[0]} in {cwd}: {error.strerror}\n")
        yield Exited(127 if missing else 126)
        return
    chunks: asyncio.Queue[Output | None] = asyncio.Queue(CHUNKS_WAITING)
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        asyncio.create_task(_read("stdout", process.stdout, chunks)),
        asyncio.create_task(_read("stderr", process.stderr, chunks)),
    ]
    ending = asyncio.create_task(_end_with(process.pid, token))
    try:
        left = len(readers)
        while left:
            chunk = await chunks.get()
            if chunk is None:
                left -= 1
            else:
                yield chunk
        code = await process.wait()
        await ending
        yield Exited(code if code >= 0 else 128 - code)
    finally:
        for task in (*readers, ending):
            task.cancel()
        if process.returncode is None or not ending.done() or ending.cancelled():
            _kill_group(process.pid)
            kill(with_environment({_mark(token)}))
            spawn(_finish(process, token))


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


async def _end_with(pid: int, token: str) -> None:
    """Once the command itself has ended, end what it left behind: that would keep its output open."""
    gone = asyncio.Event()
    try:
        watch = Watch(pid, None, gone.set)
    except ProcessLookupError:
        pass
    else:
        try:
            await gone.wait()
        finally:
            watch.close()
    await _kill_all(token)


async def _kill_all(token: str) -> None:
    while found := await asyncio.to_thread(with_environment, {_mark(token)}):
        kill(found)


async def _abandon(starting: "asyncio.Future[asyncio.subprocess.Process]", token: str) -> None:
    with suppress(OSError):
        process = await starting
        _kill_group(process.pid)
        await _finish(process, token)


async def _finish(process: asyncio.subprocess.Process, token: str) -> None:
    await _kill_all(token)
    await process.wait()


def _kill_group(pid: int) -> None:
    with suppress(OSError):  # gone meanwhile
        os.killpg(pid, signal.SIGKILL)


def _mark(token: str) -> bytes:
    return f"{MARK}={token}".encode()
