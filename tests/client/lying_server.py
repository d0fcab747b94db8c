"""A server that lags, lies, refuses and drops connections, as its script says: what clients meet in the field."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

DROP = object()
Reply = tuple[int, Any] | object


@dataclass(frozen=True)
class RawBody:
    """Bytes as they are. `missing`: how many more are promised than come."""

    data: bytes
    missing: int = 0


def run_body(phase: str = "ready", ready: int = 2, target: int = 2, **more: Any) -> dict[str, Any]:
    """A DeploymentResponse as a server without generations gives it; `generation` and others make it one of ours."""
    gang: dict[str, Any] = {
        "worldSize": {"ready": ready, "target": target, "min": more.pop("min", 1), "max": 4, "belowMinimum": ready < 1},
        "transport": "direct-mesh",
        "rankExits": [
            {"rank": r, "exitCode": code, "restartCount": 0, "terminationReason": "Completed" if code == 0 else "Error"}
            for r, code in more.pop("exits", {}).items()
        ],
        "ranks": [{"rank": r, "podName": f"p-{r}", "phase": "Running", "restarts": 0} for r in more.pop("running", ())],
    }
    bench = more.pop("bench", None)
    if bench:
        gang["bench"] = {"mode": "on-start", "phase": bench}
    version = more.pop("version", 0)
    return {
        "instanceName": "run-1",
        "friendlyName": "run",
        "userId": "u",
        "namespace": "u-u",
        "state": "Active",
        "url": "",
        "replicas": {"desired": target, "ready": ready},
        "createdAt": "2026-01-01T00:00:00Z",
        "phase": phase,
        "version": version,
        "distributed": gang | more,
    }


@dataclass
class LyingServer:
    """`script(method, path)` gives each reply; `asked` is what clients asked for."""

    script: Callable[[str, str], Reply]
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def count(self, method: str) -> int:
        return sum(m == method for m, _ in self.asked)


def sequence(*replies: Reply) -> Callable[[str, str], Reply]:
    """One after the other; the last for ever."""
    left = list(replies)
    return lambda _method, _path: left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def lying(script: Callable[[str, str], Reply]) -> Iterator[LyingServer]:
    server = LyingServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            server.asked.append((self.command, self.path))
            reply = server.script(self.command, self.path)
            if reply is DROP:
                self.close_connection = True
                self.connection.close()
                return
            status, body = cast("tuple[int, Any]", reply)
            raw = body if isinstance(body, RawBody) else RawBody(json.dumps(body).encode())
            data = raw.data
            self.close_connection = self.close_connection or raw.missing > 0
            self.send_response(status)
            self.send_header("content-length", str(len(data) + raw.missing))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_PUT = _handle

        def log_message(self, *_: object) -> None:
            pass

        def finish(self) -> None:
            if not self.connection._closed:
                super().finish()

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
