"""Results of ranks and output of commands beside them, as responses."""

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
    """Return the ranks' JSON unchanged, which is Python's: `NaN` and `Infinity` may be in it.

    A rank without a usable result is named under `problems`, with the reason; without such a rank the field is absent.
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
    """Yield a line of JSON for each output, to the exit or until the server closes. A reader that stops ends the
    command.

    Without an exit code, since the runtime lost the command or the server closes, the last line gives the reason.
    """
    server_closes = asyncio.ensure_future(closing.wait())
    step: asyncio.Future[Output | Exited | None] = asyncio.ensure_future(anext(output, None))
    try:
        while True:
            either: set[asyncio.Future[Any]] = {step, server_closes}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                yield final_line("the server is going away, and the command was ended with it")
                return
            try:
                found = step.result()
            except BasilicaError as problem:
                yield final_line(str(problem))
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


def final_line(problem: str) -> bytes:
    """Return the last line of a command that ends without an exit code."""
    return CommandOutput(stream="stderr", text=f"basilica: {problem}\n").to_json() + b"\n"
