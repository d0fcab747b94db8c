"""The acceptor of connections: one by one, each with a place among the server's connections, never in a busy loop."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn

from basilica.machine.descriptors import descriptor_limit, raise_descriptor_limit
from basilica.server.connections import ConnectionLimits, Connections, Place, limits_for
from basilica.server.protocol import HttpProtocol

log = logging.getLogger("basilica.server")

TRY_AGAIN_SECONDS = 1.0
SEND_BUFFER = 128 << 10  # the kernel's default is megabytes for each client that does not read
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections of one listening socket, and gives each a protocol."""

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        protocol: Callable[[Place], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._sock, self._connections, self._protocol, self._tls = sock, connections, protocol, tls
        self._opening: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Accept no more connections; the accepted ones remain open."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await asyncio.gather(*self._opening, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:  # the client left before it was accepted
                continue
            except OSError as error:
                log.warning("cannot accept a connection: %s; the next try is in %g s", error, TRY_AGAIN_SECONDS)
                if error.errno in EXHAUSTED:
                    self._connections.close_quietest()
                await asyncio.sleep(TRY_AGAIN_SECONDS)
                continue
            opening = loop.create_task(self._open(sock))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            await asyncio.sleep(0)  # a burst of new connections must not starve the open ones

    async def _open(self, sock: socket.socket) -> None:
        """Open a connection. A TLS handshake has the same time limit as the head of a request."""
        task = asyncio.current_task()
        assert task is not None
        place = self._connections.admit(lambda: _cancel(task))
        timeout = None if self._tls is None else place.limits.head_seconds
        protocol = self._protocol(place)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except (OSError, asyncio.CancelledError) as problem:
            log.debug("a connection was not opened: %r", problem)
            place.release()
            sock.close()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class LimitedServer(uvicorn.Server):
    """uvicorn with limited connections; the default limits follow from the descriptors of this process."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits | None = None) -> None:
        super().__init__(config)
        self._limits = limits
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        raise_descriptor_limit()
        connections = Connections(self._limits or limits_for(descriptor_limit()))

        def protocol(place: Place) -> asyncio.Protocol:
            return HttpProtocol(self.config, self.server_state, {}, place)

        self.servers = []
        self._acceptors = [Acceptor(sock, connections, protocol, self.config.ssl) for sock in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            await acceptor.close()
        await super().shutdown(sockets)

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals to the caller."""
        return contextlib.nullcontext()
