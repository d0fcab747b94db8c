"""What ranks and the commands beside them give back, as answers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from basilica.core.errors import BadResult, BasilicaError
from basilica.machine.pools import Pool
from basilica.ports import Exited, Output
from basilica.server.streams import cancel
from basilica.wire.responses import CommandExit, CommandOutput

rendering = Pool("results", 2)


def render_results(results: Mapping[int, bytes | BadResult]) -> bytes:
    """The ranks' JSON as it stands, which is Python's: `NaN` and `Infinity` may be in it.

    A rank whose result cannot be given is named under `problems`, with the reason; `problems` is only there if any is.
    """
    good: dict[int, bytes] = {}
    problems: dict[str, str] = {}
    for rank, found in sorted(results.items()):
        if isinstance(found, bytes) and _is_json(found):
            good[rank] = found.strip()
        else:
            problems[str(rank)] = found.problem if isinstance(found, BadResult) else "is no JSON"
    rows = b",".join(b'"%d":%s' % row for row in good.items())
    told = b',"problems":' + json.dumps(problems).encode() if problems else b""
    return b'{"results":{%s}%s}' % (rows, told)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


async def stream_output(
    output: AsyncGenerator[Output | Exited, None], closing: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """A line of JSON for each output, to the exit or until the server closes. Whoever stops reading ends the command.

    If there is no exit code, since the runtime lost sight of the command or the server closes, the last line says why.
    """
    server_closes = asyncio.ensure_future(closing.wait())
    step: asyncio.Future[Output | Exited | None] = asyncio.ensure_future(anext(output, None))
    try:
        while True:
            either: set[asyncio.Future[Any]] = {step, server_closes}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                yield last_words("the server is going away, and the command was ended with it")
                return
            try:
                found = step.result()
            except BasilicaError as problem:
                yield last_words(str(problem))
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
        await cancel(server_closes, step)
        await output.aclose()


def last_words(problem: str) -> bytes:
    """The last line of a command that ends without an exit code."""
    return CommandOutput(stream="stderr", text=f"basilica: {problem}\n").to_json() + b"\n"
