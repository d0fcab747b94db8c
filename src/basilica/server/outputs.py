"""What ranks and the commands beside them give back, as answers."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from basilica.core.errors import BasilicaError, DistributedError
from basilica.ports import Exited, Output
from basilica.wire.responses import CommandExit, CommandOutput

_closing: set[asyncio.Future[Any]] = set()


def render_results(results: Mapping[int, bytes]) -> bytes:
    """The ranks' JSON as it stands, which is Python's: `NaN` and `Infinity` may be in it."""
    for rank, text in results.items():
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            raise DistributedError(f"what rank {rank} wrote to its result file is no JSON") from None
    rows = b",".join(b'"%d":%s' % (rank, text.strip()) for rank, text in sorted(results.items()))
    return b'{"results":{%s}}' % rows


async def stream_output(output: AsyncGenerator[Output | Exited, None], closing: asyncio.Event) -> AsyncIterator[bytes]:
    """A line of JSON for each output, to the exit or until the server closes. Whoever stops reading ends the command.

    If the runtime loses sight of the command, the last line says why, and there is no exit code. A reader that has gone
    cancels every `await` here, so the end is left to a task of its own.
    """
    server_closes = asyncio.ensure_future(closing.wait())
    step: asyncio.Future[Output | Exited | None] = asyncio.ensure_future(anext(output, None))
    try:
        while True:
            either: set[asyncio.Future[Any]] = {step, server_closes}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                return
            try:
                found = step.result()
            except BasilicaError as problem:
                yield CommandOutput(stream="stderr", text=f"basilica: {problem}\n").to_json() + b"\n"
                return
            match found:
                case Output(stream, text):
                    yield CommandOutput(stream=stream, text=text).to_json() + b"\n"
                case Exited(code):
                    yield CommandExit(exit_code=code).to_json() + b"\n"
                    return
                case None:
                    return
            step = asyncio.ensure_future(anext(output, None))
    finally:
        server_closes.cancel()
        step.cancel()
        task = asyncio.ensure_future(_close(step, output))
        _closing.add(task)
        task.add_done_callback(_closing.discard)


async def _close(step: asyncio.Future[Any], output: AsyncGenerator[Any, None]) -> None:
    await asyncio.gather(step, return_exceptions=True)
    await output.aclose()
