"""The connection between the two probes: messages for what they arrange, raw bytes for the TCP method.

Every call ends: with a result, or with a `ProbeError` of one line once the deadline has come or the other end is gone.
"""

import json
import select
import socket
import time
from typing import Any

MAGIC = b"basilica-bench/1\n"
MESSAGE_MAX = 1 << 16
STALL_S = 30.0  # a link on which nothing moves for so long is as good as cut


class ProbeError(Exception):
    """Why there is no result, in one line."""


class PeerGone(ProbeError):
    """The other end closed the connection, or died."""


class Deadline:
    """One point in time for all that a probe does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._at - time.monotonic())


class Link:
    """`peer` is what errors call the other end."""

    def __init__(self, sock: socket.socket, deadline: Deadline, peer: str = "the other probe") -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._deadline = deadline
        self._poll = select.poll()
        self.peer = peer
        self.own_host: str = sock.getsockname()[0]
        self.peer_host: str = sock.getpeername()[0]

    def greet(self) -> None:
        self.exchange(memoryview(MAGIC), memoryview(b""))

    def expect_greeting(self) -> None:
        heard = bytearray(len(MAGIC))
        self.exchange(memoryview(b""), memoryview(heard))
        if heard != MAGIC:
            raise ProbeError(f"what answers at {self.peer_host} is no bench probe of this version")

    def tell(self, **message: Any) -> None:
        body = json.dumps(message).encode()
        self.exchange(memoryview(len(body).to_bytes(4, "big") + body), memoryview(b""))

    def hear(self) -> dict[str, Any]:
        head = bytearray(4)
        self.exchange(memoryview(b""), memoryview(head))
        size = int.from_bytes(head, "big")
        if size > MESSAGE_MAX:
            raise ProbeError(f"{self.peer} sent something that is no message of a bench probe")
        body = bytearray(size)
        self.exchange(memoryview(b""), memoryview(body))
        try:
            message = json.loads(body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ProbeError(f"{self.peer} sent something that is no message of a bench probe")
        if "error" in message:
            raise ProbeError(f"{self.peer}: {message['error']}")
        return message

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of `out` and fill all of `into`, both at the same time: a link carries both ways at once."""
        while out or into:
            moved = 0
            try:
                if out:
                    sent = self._try_send(out)
                    out, moved = out[sent:], sent
                if into:
                    received = self._try_receive(into)
                    into, moved = into[received:], moved + received
            except (ConnectionError, TimeoutError) as error:
                raise PeerGone(f"{self.peer} went away: {error.strerror or error}") from None
            except OSError as error:
                raise ProbeError(f"the link to {self.peer} broke: {error.strerror or error}") from None
            if not moved:
                self._wait((select.POLLOUT if out else 0) | (select.POLLIN if into else 0))

    def _try_send(self, out: memoryview) -> int:
        try:
            return self._sock.send(out)
        except BlockingIOError:
            return 0

    def _try_receive(self, into: memoryview) -> int:
        try:
            received = self._sock.recv_into(into)
        except BlockingIOError:
            return 0
        if received == 0:
            raise ConnectionResetError("it closed the connection")
        return received

    def _wait(self, for_what: int) -> None:
        seconds = min(STALL_S, self._deadline.left())
        self._poll.register(self._sock, for_what)
        if not self._poll.poll(seconds * 1000):
            raise ProbeError(f"nothing came from {self.peer} for {seconds:.0f} s")

    def close(self) -> None:
        self._sock.close()
