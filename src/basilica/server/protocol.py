"""HTTP/1.1 as uvicorn speaks it, with a bound on the head of a request and our own body for what is not HTTP."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from basilica.server.problems import plain

MAX_HEAD = 256 << 10


class HttpProtocol(HttpToolsProtocol):
    """The parser has no bound of its own: a head that never ends would fill the memory."""

    _in_head = True
    _head_size = 0

    def on_message_begin(self) -> None:
        self._in_head, self._head_size = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse(431, f"the request's line and headers are larger than {MAX_HEAD} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        response = plain(status, message)
        head = [b"HTTP/1.1 %d %s" % (status, _REASONS[status]), b"connection: close"]
        head += [b"%s: %s" % header for header in response.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()


_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}
