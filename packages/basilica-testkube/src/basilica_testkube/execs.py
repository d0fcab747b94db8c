"""Commands in containers, over a WebSocket: `GET .../pods/NAME/exec`.

With v5 the API server answers itself, and what the kubelet refuses comes as a status on the error channel. With v4 it
passes the connection on to the kubelet, whose refusals are answers to the question. A client that goes does not end its
command: the command's pipes are closed, and that is all.
"""

import asyncio
import json
from asyncio import ReadTransport, StreamReader, StreamWriter, WriteTransport
from collections.abc import Sequence
from functools import partial
from typing import IO

from basilica_testkube.errors import ApiError, bad_request
from basilica_testkube.http import Reply, Request, Upgrade
from basilica_testkube.kubelet import Kubelet
from basilica_testkube.logs import container_of
from basilica_testkube.podworker import Run
from basilica_testkube.processes import Command
from basilica_testkube.values import Json, meta
from basilica_testkube.websocket import ServerSocket, accepting

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_CHUNK = 1 << 15
_SUCCESS: Json = {"metadata": {}, "status": "Success"}


def serve_exec(kubelet: Kubelet, pod: Json, request: Request) -> Reply | Upgrade:
    """The answer to a client that wants to run a command."""
    container = container_of(pod, request.query)
    if not pod["spec"].get("nodeName"):
        raise bad_request(f"pod {meta(pod)['name']} does not have a host assigned")
    wants = {
        name: request.query.get(name, "false").lower() not in ("false", "0")
        for name in ("stdin", "stdout", "stderr", "tty")
    }
    if wants["tty"]:
        raise bad_request("this cluster has no terminals")
    if not (wants["stdin"] or wants["stdout"] or wants["stderr"]):
        raise bad_request("you must specify at least 1 of stdin, stdout, stderr")
    argv = request.repeated.get("command")
    if not argv:
        raise bad_request("you must specify at least one command for the container")
    key = request.headers.get("sec-websocket-key")
    if request.headers.get("upgrade", "").lower() != "websocket" or not key:
        raise bad_request("Upgrade request required")
    offered = [name.strip() for name in request.headers.get("sec-websocket-protocol", "").split(",")]
    protocol = V5 if V5 in offered else V4
    if protocol not in offered:
        return Reply(403, b"", {"Content-Type": "text/plain"})
    channels = [number for number, name in ((_STDOUT, "stdout"), (_STDERR, "stderr")) if wants[name]]
    found: Run | LookupError
    try:
        found = kubelet.running(pod, container)
    except LookupError as error:
        if protocol == V4:
            return Reply(500, str(error).encode(), {"Content-Type": "text/plain"})
        found = error
    session = _Session(kubelet, found, argv, channels, protocol=protocol, stdin=wants["stdin"])
    return Upgrade(accepting(key, protocol), session.serve)


class _Session:
    """One command and its client."""

    def __init__(
        self,
        kubelet: Kubelet,
        run: Run | LookupError,
        argv: Sequence[str],
        channels: Sequence[int],
        *,
        protocol: str,
        stdin: bool,
    ) -> None:
        self._kubelet, self._run, self._argv, self._channels = kubelet, run, argv, channels
        self._protocol, self._stdin = protocol, stdin

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        socket = ServerSocket(reader, writer)
        await socket.send(bytes((min(self._channels, default=_ERROR),)))  # empty: the connection is made
        if isinstance(self._run, LookupError):
            await _finish(socket, _internal(str(self._run)))
            return
        try:
            command = self._kubelet.execute(self._run, self._argv, stdin=self._stdin)
        except OSError as error:
            what = f'exec: "{error.filename}": {error.strerror}'
            await _finish(socket, _internal(f"error executing command in container: failed to start exec: {what}"))
            return
        await self._carry(socket, command)

    async def _carry(self, socket: ServerSocket, command: Command) -> None:
        pipes = await _Pipes.of(command)
        client = asyncio.ensure_future(self._take(socket, pipes))
        output = asyncio.ensure_future(self._give(socket, command, pipes))
        try:
            await asyncio.wait((client, output), return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                await _finish(socket, _status(output.result()))
        finally:
            for task in (client, output):
                task.cancel()
            await asyncio.gather(client, output, return_exceptions=True)
            pipes.close()

    async def _take(self, socket: ServerSocket, pipes: "_Pipes") -> None:
        """What the client says, until it has gone."""
        async for message in socket.messages():
            if self._protocol == V5 and message == bytes((_CLOSE, _STDIN)):
                pipes.close_stdin()
            elif message[:1] == bytes((_STDIN,)) and pipes.stdin is not None:
                pipes.stdin.write(message[1:])

    async def _give(self, socket: ServerSocket, command: Command, pipes: "_Pipes") -> int:
        """What the command says, to its end and that of its output."""
        wanted = {number: stream for number, stream in pipes.outputs.items() if number in self._channels}
        unwanted = [stream for number, stream in pipes.outputs.items() if number not in self._channels]
        await asyncio.gather(
            *(_pump(socket, number, stream) for number, stream in wanted.items()),
            *(_drain(stream) for stream in unwanted),
        )
        return await asyncio.shield(command.exit_code)


class _Pipes:
    """Our ends of a command's standard streams."""

    def __init__(
        self, stdin: WriteTransport | None, outputs: dict[int, StreamReader], readers: Sequence[ReadTransport]
    ) -> None:
        self.stdin, self.outputs, self._readers = stdin, outputs, readers

    @classmethod
    async def of(cls, command: Command) -> "_Pipes":
        loop = asyncio.get_running_loop()
        stdin: WriteTransport | None = None
        if command.popen.stdin is not None:
            stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, command.popen.stdin)
        outputs, readers = {}, []
        pipes: list[tuple[int, IO[bytes] | None]] = [(_STDOUT, command.popen.stdout), (_STDERR, command.popen.stderr)]
        for number, pipe in pipes:
            outputs[number] = StreamReader()
            protocol = partial(asyncio.StreamReaderProtocol, outputs[number])
            readers.append((await loop.connect_read_pipe(protocol, pipe))[0])
        return cls(stdin, outputs, readers)

    def close_stdin(self) -> None:
        if self.stdin is not None:
            self.stdin.close()
            self.stdin = None

    def close(self) -> None:
        self.close_stdin()
        for reader in self._readers:
            reader.close()


async def _pump(socket: ServerSocket, channel: int, stream: StreamReader) -> None:
    while data := await stream.read(_CHUNK):
        await socket.send(bytes((channel,)) + data)


async def _drain(stream: StreamReader) -> None:
    while await stream.read(_CHUNK):
        pass


async def _finish(socket: ServerSocket, status: Json) -> None:
    await socket.send(bytes((_ERROR,)) + json.dumps(status).encode())
    await socket.close()


def _status(code: int) -> Json:
    if code == 0:
        return _SUCCESS
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: command terminated with exit code {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _internal(why: str) -> Json:
    return ApiError(500, "InternalError", f"Internal error occurred: {why}", {"causes": [{"message": why}]}).body
