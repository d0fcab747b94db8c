"""A control plane as a process: it listens, publishes its address, and shuts down cleanly on a signal."""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import json
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from basilica.controller.loop import Controller
from basilica.controller.plane import ControlPlane, Settings
from basilica.controller.retention import repeat_hourly
from basilica.core.damage import Trouble
from basilica.core.errors import BasilicaError
from basilica.core.why import Absence
from basilica.machine.clock_steps import watch_wall_clock
from basilica.machine.places import NOTE_FILE, start_of
from basilica.ports import Clock, Keys, Runtime, Store
from basilica.server.acceptor import LimitedServer
from basilica.server.app import build_app
from basilica.server.auth import check_key, digest_of, key_record, new_key
from basilica.server.idle import IdleExit
from basilica.server.metrics import Metrics
from basilica.server.sessions import SESSIONS_FILE, Sessions

log = logging.getLogger("basilica.server")

DEFAULT_USER = "local"
DRAIN_SECONDS = 5
# Longer than the keep-alive of clients (90 s in the published one), so that the client closes a connection. The
# published client polls every 5 s, does not repeat a request that meets a closing connection, and then deletes the run
# that it was waiting for.
KEEP_ALIVE_SECONDS = 120


class CannotServe(BasilicaError):
    """A refusal to serve as requested; the message names the alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 7411
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a server; `wiring` chooses the adapters."""

    store: Store
    keys: Keys
    runtime: Runtime
    clock: Clock
    settings: Settings
    unattended: Callable[[], Absence | None] = lambda: None
    keep_clock: Callable[[], None] = lambda: None  # persists the origin of the clock's time line
    troubles: Callable[[], list[Trouble]] = list


async def serve(parts: Parts, listen: Listen, state_dir: Path, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, or until idle for the time of the settings. Ranks go on; the next server adopts
    them."""
    _check_tls(listen)
    key_file = await ensure_key(parts.keys, parts.clock, state_dir, listen)
    closing = asyncio.Event()
    metrics = Metrics()
    plane = ControlPlane(parts.store, parts.runtime, parts.clock, parts.settings, troubles=parts.troubles)
    controller = Controller(parts.store, parts.runtime, parts.clock)
    metrics.add_controller(controller)
    app = build_app(plane, parts.keys, metrics, closing, Sessions(parts.clock, state_dir / SESSIONS_FILE))
    seconds = parts.settings.idle_exit_seconds
    idle = None if seconds is None else IdleExit(app, seconds, lambda: controller.busy)
    server = _Server(_config(idle or app, listen), closing)
    with contextlib.closing(bind(listen)) as sock, server.handling_signals():
        url = _url(listen, sock)
        try:
            await _start(controller, state_dir)
            async with _retention(plane), watch_wall_clock(lambda: _clock_moved(parts, controller)):
                with _note(state_dir, url, key_file, listen) as withdraw:
                    server.withdraw = withdraw
                    announce(url)
                    with contextlib.nullcontext() if idle is None else idle.watching(server.leave):
                        await server.serve(sockets=[sock])
        finally:
            await controller.close()


async def serve_stateless(parts: Parts, listen: Listen, announce: Callable[[str], None]) -> None:
    """Serve the API until SIGTERM or SIGINT; an operator elsewhere is the controller. This process keeps no state."""
    _check_tls(listen)
    closing = asyncio.Event()
    plane = ControlPlane(parts.store, parts.runtime, parts.clock, parts.settings, parts.unattended, parts.troubles)
    app = build_app(plane, parts.keys, Metrics(), closing)
    server = _Server(_config(app, listen), closing)
    with contextlib.closing(bind(listen)) as sock, server.handling_signals():
        try:
            await parts.runtime.start(_ignore_wake)
            announce(_url(listen, sock))
            await server.serve(sockets=[sock])
        finally:
            await parts.runtime.close()


def _clock_moved(parts: Parts, controller: Controller) -> None:
    log.warning(
        "the wall clock was set, or the machine was suspended: moments are shown %+.0f s from the server's own time "
        "line, and durations go on as they were",
        parts.clock.shift(),
    )
    asyncio.get_running_loop().run_in_executor(None, parts.keep_clock)
    controller.rearm()


def _ignore_wake(instance: str) -> None:
    pass


async def _start(controller: Controller, state_dir: Path) -> None:
    try:
        await controller.start()
    except OSError as error:
        raise CannotServe(f"cannot take up what is in {state_dir}: {error}") from error


async def register_key(keys: Keys, clock: Clock, api_key: str | None) -> None:
    """Register the key that the server was started with, if any."""
    if api_key is None:
        return
    api_key = check_key(api_key)
    if await keys.find_key(digest_of(api_key)) is None:
        await keys.add_key(key_record(api_key, DEFAULT_USER, clock.now() + clock.shift(), note="given at the start"))


async def ensure_key(keys: Keys, clock: Clock, state_dir: Path, listen: Listen) -> Path:
    """Return the file with the key of the local user. The first start creates it, unless the server listens beyond
    loopback."""
    path = state_dir / "api-key"
    if path.exists() and await keys.find_key(digest_of(_read_text(path).strip())) is not None:
        return path
    if not listen.loopback and not await keys.keys():
        raise CannotServe(
            f"refusing to listen on {listen.host} without any API key: make one with "
            "'basilica keys create --user NAME', or give --api-key-file"
        )
    key = new_key()  # also in place of a revoked one: a restart must not restore it
    _write_private(path, key + "\n")
    await keys.add_key(key_record(key, DEFAULT_USER, clock.now() + clock.shift(), note="made by the server"))
    return path


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise CannotServe(f"cannot read {path}: {error.strerror}") from error


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        fresh.rename(path)
    except OSError as error:
        raise CannotServe(f"cannot write {path}: {error.strerror}") from error


def _check_tls(listen: Listen) -> None:
    if (listen.tls_cert is None) != (listen.tls_key is None):
        raise CannotServe("--tls-cert and --tls-key go together")
    if listen.tls_cert is None or listen.tls_key is None:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # With a password given, an encrypted key is an error instead of a prompt that nobody answers.
        context.load_cert_chain(listen.tls_cert, listen.tls_key, password="")
    except OSError as error:
        files = f"--tls-cert {listen.tls_cert} and --tls-key {listen.tls_key}"
        raise CannotServe(f"cannot use {files}: {error.strerror or error}") from error


def bind(listen: Listen) -> socket.socket:
    """Return the listening socket; its backlog keeps connections that arrive while the server starts."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # without it, asyncio sets no TCP_NODELAY
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((listen.host, listen.port))
        sock.listen(1024)
    except (OSError, UnicodeError) as error:
        sock.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        hint = "another program listens there: choose another --port" if taken else "choose another --host"
        problem = error.strerror if isinstance(error, OSError) else "not a host name"
        raise CannotServe(f"cannot listen on {listen.host}:{listen.port}: {problem}; {hint}") from error
    return sock


def _url(listen: Listen, sock: socket.socket) -> str:
    scheme = "https" if listen.tls_cert else "http"
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"


def _config(app: object, listen: Listen) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=DRAIN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=None if listen.tls_cert is None else str(listen.tls_cert),
        ssl_keyfile=None if listen.tls_key is None else str(listen.tls_key),
    )


class _Server(LimitedServer):
    """uvicorn, which ends lasting responses (streams, long polls) before it waits for them."""

    def __init__(self, config: uvicorn.Config, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing
        self.withdraw: Callable[[], None] = _nothing

    def leave(self) -> None:
        """Exit because the server is idle."""
        log.info("idle: no run is live and nobody asks")
        self.withdraw()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        super().handle_exit(sig, frame)  # type: ignore[arg-type]
        self.force_exit = False  # a second Ctrl-C must not abort the closing of the state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.withdraw()  # before the socket closes, so that no client finds a note of a server that refuses it
        self._closing.set()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT and, unlike uvicorn, do not raise them again afterwards: the process ends by
        returning.

        The handlers are installed before the address is published, so that no client can interrupt the start.
        """
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _note(state_dir: Path, url: str, key_file: Path, listen: Listen) -> Iterator[Callable[[], None]]:
    """Publish this server's address to clients on the same machine, in a file that is removed when the server stops
    or the yielded function is called. Pid and start time identify one process for ever: no other passes for it."""
    path = state_dir / NOTE_FILE
    note: dict[str, object] = {"url": url, "pid": os.getpid(), "keyFile": str(key_file), "startedAt": time.time()}
    ticks = start_of(os.getpid())
    if ticks is not None:
        note["startTicks"] = ticks
    if listen.tls_cert is not None:
        note["tlsCert"] = str(listen.tls_cert.absolute())
    _write_private(path, json.dumps(note))
    withdraw = functools.partial(path.unlink, missing_ok=True)
    try:
        yield withdraw
    finally:
        withdraw()


@contextlib.asynccontextmanager
async def _retention(plane: ControlPlane) -> AsyncIterator[None]:
    """Remove old archives that no run uses and, if the settings have a retention, old runs: now and every hour."""
    task = asyncio.create_task(repeat_hourly(plane.retention.works))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
