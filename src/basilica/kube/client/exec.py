"""Commands in containers: what `kubectl exec` does, with the output in pieces and the exit code at last.

The API server carries the streams of a command over one WebSocket; the first byte of a message says which one it is of.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from basilica.kube.client.api import UNREACHABLE, ApiError, KubeApi
from basilica.kube.client.websocket import Piece, WebSocket, WebSocketError

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")  # the second is that of servers before 1.30
STDOUT, STDERR, ERROR = 1, 2, 3
STATUS_BYTES_MAX = 1 << 20


async def execute(
    api: KubeApi, pod: str, container: str, argv: Sequence[str], *, stdin: bool = False
) -> AsyncGenerator[tuple[int, bytes] | int, None]:
    """What the command writes, as (`STDOUT` or `STDERR`, bytes), and at last its exit code. `pod` is its path.

    With `stdin` the command has one, to which nothing is written: it comes to its end when the connection does, which
    is all that the command gets to know of it. Kubernetes does not end a command whose client has gone.
    """
    query = [("container", container), ("stdin", "true")] if stdin else [("container", container)]
    query += [("stdout", "true"), ("stderr", "true"), *(("command", word) for word in argv)]
    try:
        async with api.websocket(f"{pod}/exec", query, PROTOCOLS) as socket, aclosing(_streams(socket)) as streams:
            async for found in streams:
                yield found
                if isinstance(found, int):
                    return
    except WebSocketError as error:
        problem = f"the command's connection to {pod} is lost, and how the command ends is not known: {error}"
        raise ApiError(UNREACHABLE, "Unreachable", problem) from error


async def _streams(socket: WebSocket) -> AsyncGenerator[tuple[int, bytes] | int, None]:
    status, channel = bytearray(), 0
    async with aclosing(socket.pieces()) as pieces:
        async for piece in pieces:
            channel, data = _channel(piece, channel)
            if channel == ERROR:
                status += data
                if len(status) > STATUS_BYTES_MAX:
                    raise WebSocketError("the server sent an endless status")
                if piece.last:
                    yield exit_code(bytes(status))
                    return
            elif channel in (STDOUT, STDERR) and data:
                yield channel, data
    raise WebSocketError(f"the server closed it {socket.farewell}")


def _channel(piece: Piece, before: int) -> tuple[int, bytes]:
    """Which channel the piece is of, and what it has for it. A message without a byte is of none."""
    if not piece.first:
        return before, piece.data
    return (piece.data[0], piece.data[1:]) if piece.data else (0, b"")


def exit_code(status: bytes) -> int:
    """The command's exit code. If it never ran, or nobody knows how it ended: `ApiError`."""
    try:
        found: Any = json.loads(status)
        if found["status"] == "Success":
            return 0
        if found.get("reason") == "NonZeroExitCode":
            causes = found["details"]["causes"]
            return next(int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode")
        raise ApiError(int(found.get("code") or 500), str(found.get("reason") or "Unknown"), str(found["message"]))
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration):
        text = status[:500].decode(errors="replace")
        raise ApiError(500, "Unknown", f"how the command ended cannot be told from {text!r}") from None
