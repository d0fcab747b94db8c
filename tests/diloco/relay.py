"""A relay in front of a server: the link that a test can cut, slow down, or let hang."""

import socket
import threading
import time
from contextlib import suppress
from typing import Self

PIECE = 64 << 10


class Relay:
    """Relays connections on this machine. `cut()` ends all of them and takes no more; `mend()` takes them again."""

    def __init__(self, server: str) -> None:
        """`server` is its address as a URL; `url` is ours."""
        host, _, port = server.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.bytes_per_second = float("inf")
        self.hangs = False
        """Takes what it is sent, and passes nothing on."""
        self.requests_cut = 0
        self._is_cut = False
        self.connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        self.cut()

    def cut(self) -> None:
        self._is_cut = True
        for connection in self.connections:
            _end(connection)

    def mend(self) -> None:
        self._is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            if self._is_cut:
                self.requests_cut += 1
                near.close()
                continue
            far = socket.create_connection(self._server)
            self.connections += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(PIECE):
                time.sleep(len(data) / self.bytes_per_second)
                if not self.hangs:
                    other.sendall(data)
        except OSError:
            pass  # it was cut
        finally:
            _end(one)
            _end(other)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # the other end was faster
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
