"""The embedded server: a control plane in the background, one per user and state directory, found or started.

A server publishes its address and its process in a note in its state directory, so that finding it costs no request. A
server that is about to stop removes the note first; a client that finds no note waits for the old process to end before
it starts another server. Runs go on meanwhile, and the next server adopts them.
"""

import fcntl
import functools
import io
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from basilica.client.drivers import Endpoint
from basilica.core import environment as env
from basilica.core.errors import AuthenticationError, BasilicaError, ValidationError
from basilica.core.phase import Phase
from basilica.machine.places import LOCK_FILE, NOTE_FILE, default_state_dir, start_of

IDLE_EXIT_VARIABLE = env.IDLE_EXIT
IDLE_EXIT_SECONDS = 900.0
START_LOCK = "start.lock"
LOG_FILE = "server.log"
LOG_BYTES = 10 << 20
START_SECONDS = 60.0
POLL_SECONDS = 0.05  # only where the system has no notification
SHOWN_LINES = 20


class CannotStart(BasilicaError):
    """The local server of `state_dir` cannot start. `said` are the last lines of its log, if it has one."""

    def __init__(self, state_dir: str, problem: str, said: str = "") -> None:
        super().__init__(state_dir, problem, said)
        self.state_dir, self.problem, self.said = state_dir, problem, said

    def __str__(self) -> str:
        said = f"\n{self.said}" if self.said else ""
        return f"cannot start a local server on {self.state_dir}: {self.problem}{said}"


class CannotStop(BasilicaError):
    """The server of `state_dir` still runs."""

    def __init__(self, state_dir: str, problem: str) -> None:
        super().__init__(state_dir, problem)
        self.state_dir, self.problem = state_dir, problem

    def __str__(self) -> str:
        return f"cannot stop the server of {self.state_dir}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server, as its note describes it."""

    state_dir: Path
    url: str
    pid: int
    key_file: Path
    started_at: float | None
    start_ticks: int | None
    tls_cert: str | None

    @property
    def endpoint(self) -> Endpoint:
        try:
            key = self.key_file.read_text().strip()
            verify = True if self.tls_cert is None else _trust(self.tls_cert, os.stat(self.tls_cert).st_mtime_ns)
        except (OSError, ValueError) as error:
            raise AuthenticationError(
                f"the server at {self.url} runs, but what is needed to talk to it cannot be read: {error}; "
                "'basilica local stop' ends it, and the next one makes a new key"
            ) from error
        return Endpoint(self.url, key, verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedStatus:
    """The state of an embedded server. `live_runs` is None if it did not answer; `log_file` is None if `locate` did
    not start it."""

    url: str
    pid: int
    state_dir: Path
    key_file: Path
    log_file: Path | None
    started_at: float | None
    live_runs: int | None


# ---- public functions --------------------------------------------------------------------------------------------


def locate(state_dir: Path | None = None) -> Endpoint:
    """Return the server of the state directory; start one if none runs. Raises `CannotStart`."""
    directory = _absolute(state_dir)
    return (_find(directory) or _find_or_start(directory)).endpoint


def find(state_dir: Path | None = None) -> Running | None:
    """Return the server of the state directory, if one runs."""
    return _find(_absolute(state_dir))


def status(state_dir: Path | None = None) -> EmbeddedStatus | None:
    """Return the state of the server of the state directory; None if none runs."""
    running = find(state_dir)
    if running is None:
        return None
    log = running.state_dir / LOG_FILE
    live: int | None
    try:
        live = len(_live_runs(functools.partial(request, running.endpoint)))
    except (BasilicaError, httpx2.TransportError):
        live = None
    return EmbeddedStatus(
        url=running.url,
        pid=running.pid,
        state_dir=running.state_dir,
        key_file=running.key_file,
        log_file=log if log.exists() else None,
        started_at=running.started_at,
        live_runs=live,
    )


def shutdown(state_dir: Path | None = None, *, cancel_runs: bool = False, timeout: float = 30.0) -> bool:
    """End the server of the state directory; False if none ran. Raises `CannotStop` if the time is up first.

    Live runs go on, and the next server adopts them; with `cancel_runs` they are cancelled, and their end awaited.
    """
    directory = _absolute(state_dir)
    deadline = time.monotonic() + timeout
    if not directory.is_dir():
        return False
    try:
        with _only_one(directory):  # waits for a server that another process is starting
            running = _find(directory) or _wait_for_owner(directory, deadline)
            if running is None:
                return False
            if cancel_runs:
                _cancel_runs(running, deadline)
            _terminate(running, deadline)
    except (OSError, httpx2.TransportError) as error:
        raise CannotStop(str(directory), str(error)) from error
    except _OutOfTime as error:
        raise CannotStop(str(directory), f"{error} (after {timeout:g} s)") from error
    return True


def request(endpoint: Endpoint, method: str, path: str, *, timeout: float = 60.0, **options: Any) -> dict[str, Any]:
    """One call, not repeated; errors that the server tells are `BasilicaError`."""
    # No proxy of the environment is asked about a server of this machine.
    with httpx2.Client(headers=endpoint.headers(), timeout=timeout, trust_env=False, verify=endpoint.verify) as http:
        answer = http.request(method, endpoint.url + path, **options)
    try:
        body: dict[str, Any] = answer.json()
        problem = body["error"]["message"] if answer.is_error else None
    except (ValueError, LookupError, TypeError) as error:
        raise BasilicaError(f"{endpoint.url} answered {answer.status_code} and no JSON of ours") from error
    if problem is not None:
        raise BasilicaError(problem)
    return body


# ---- finding -----------------------------------------------------------------------------------------------------


def _absolute(state_dir: Path | None) -> Path:
    return (default_state_dir() if state_dir is None else Path(state_dir).expanduser()).absolute()


def _find(directory: Path) -> Running | None:
    running = _read_note(directory)
    return running if running is not None and _is_alive(running) else None


def _read_note(directory: Path) -> Running | None:
    """Read the server's note. Any other content counts as no note: the server writes it atomically."""
    try:
        note = json.loads((directory / NOTE_FILE).read_bytes())
        ticks, started, cert = note.get("startTicks"), note.get("startedAt"), note.get("tlsCert")
        return Running(
            state_dir=directory,
            url=str(note["url"]),
            pid=int(note["pid"]),
            key_file=Path(note["keyFile"]),
            started_at=None if started is None else float(started),
            start_ticks=None if ticks is None else int(ticks),
            tls_cert=None if cert is None else str(cert),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None


def _is_alive(running: Running) -> bool:
    """Return whether the process that wrote the note runs: not a zombie, and not another process with its pid."""
    if running.start_ticks is not None:
        return start_of(running.pid) == running.start_ticks
    return running.pid > 0 and _owner(running.state_dir) == running.pid


@functools.cache
def _trust(certificate: str, _changed: int) -> ssl.SSLContext:
    """Return a TLS context that trusts exactly the certificate that the server was started with, whatever its name."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _owner(directory: Path) -> int | None:
    """Return the pid of the process that has the state file in use, 0 if its pid is unknown; None if there is none."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(fd)
    return None


class _OutOfTime(Exception):
    """The time is up; the message names the step that has not happened."""


def _wait_for_owner(directory: Path, deadline: float) -> Running | None:
    """Wait until no process has the state file in use: a stopping server removes its note before it exits. Or until the
    owner has a note, and return it: a starting server opens the file before it writes its note."""
    while (pid := _owner(directory)) is not None:
        if (running := _find(directory)) is not None:
            return running
        left = deadline - time.monotonic()
        if left <= 0:
            raise _OutOfTime(
                f"process {pid or 'unknown'} has its state in use and cannot be found from here (on another machine, "
                "in another container?): end it, or set BASILICA_API_URL to its address"
            )
        _wait_for_end(pid, min(left, POLL_SECONDS))
    return None


def _wait_for_end(pid: int, seconds: float) -> bool:
    """Return True as soon as the process has ended; False when the time is up, also where its end is not observable."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError, OverflowError):
        time.sleep(seconds)
        return False
    try:
        return _readable(fd, seconds)
    finally:
        os.close(fd)


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


# ---- starting ----------------------------------------------------------------------------------------------------


def _find_or_start(directory: Path) -> Running:
    deadline = time.monotonic() + START_SECONDS
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_one(directory):
            while True:
                running = _find(directory) or _wait_for_owner(directory, deadline) or _start(directory, deadline)
                if running is not None:
                    return running
    except OSError as error:
        problem = f"{error.strerror or error}: {error.filename or directory}"
        raise CannotStart(str(directory), f"{problem}; BASILICA_STATE_DIR names another directory") from error
    except _OutOfTime as error:
        raise CannotStart(str(directory), f"{error} (after {START_SECONDS:g} s)") from error


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Lock the directory for one process, and one thread of it, at a time."""
    fd = os.open(directory / START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the descriptor, too
    finally:
        os.close(fd)


def _start(directory: Path, deadline: float) -> Running | None:
    """Start a server and wait until it serves. None: another process was quicker, and the caller finds its server."""
    if not sys.executable:
        raise CannotStart(str(directory), "this program does not know its Python; run 'basilica local start' first")
    with _open_log(directory) as log:
        begin = log.seek(0, os.SEEK_END)
        ours, theirs = os.pipe()
        try:
            try:
                process = _spawn(directory, log.fileno(), theirs)
            finally:
                os.close(theirs)
            _wait_until_ready(process, ours, deadline)
        finally:
            os.close(ours)
        if (running := _find(directory)) is not None:
            return running
        lines = _tail(log.fileno(), begin)
    if _owner(directory) is not None:
        return None
    raise _failed(directory, lines)


def _spawn(directory: Path, log: int, ready: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "basilica.cli.main", "serve", "--port", "0"]
    command += ["--state-dir", str(directory), "--idle-exit", f"{_idle_seconds():f}", "--detach", str(ready)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env=_environment(),
        start_new_session=True,  # a Ctrl-C at the script's terminal, or its hang-up, must not end the server
        pass_fds=[ready],
    )


def _environment() -> dict[str, str]:
    """Return our environment without the variables that point a client or a rank to its own server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BASILICA_")}
    if "PYTHONPATH" in environment:  # its entries may be relative to our working directory
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return environment


def _idle_seconds() -> float:
    text = os.environ.get(IDLE_EXIT_VARIABLE, "")
    try:
        seconds = float(text) if text else IDLE_EXIT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValidationError(IDLE_EXIT_VARIABLE, text, "must be a number of seconds, 0 for never")
    return seconds


def _wait_until_ready(process: subprocess.Popen[bytes], pipe: int, deadline: float) -> None:
    """Wait until the server reports that it serves, or has ended. Its first line is its pid, once it is detached."""
    received = b""
    try:
        while received.count(b"\n") < 2:
            if not _readable(pipe, deadline - time.monotonic()):
                raise _OutOfTime("it is starting and does not serve yet; its log is server.log in that directory")
            data = os.read(pipe, 4096)
            if not data:
                break
            received += data
    finally:
        if b"\n" not in received:
            process.kill()  # it has not detached; if it has ended already, this does nothing
        process.wait()
    if received.count(b"\n") == 1:  # its end of the pipe closes a moment before the process ends
        _wait_for_end(int(received), deadline - time.monotonic())


def _open_log(directory: Path) -> io.FileIO:
    """Open the log for appending; start it afresh when it has become long."""
    path = directory / LOG_FILE
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "rb+", buffering=0)


def _tail(log: int, begin: int) -> list[str]:
    text = os.pread(log, 1 << 16, max(begin, os.fstat(log).st_size - (1 << 16)))
    return text.decode("utf-8", "replace").splitlines()[-SHOWN_LINES:]


def _failed(directory: Path, lines: list[str]) -> CannotStart:
    """Return the error of a server that ended: the reason that it logged in one sentence, else its last lines."""
    place = f"its log is {directory / LOG_FILE}"
    if lines and lines[-1].startswith("basilica: "):
        return CannotStart(str(directory), f"{lines[-1].removeprefix('basilica: ')} ({place})")
    return CannotStart(str(directory), f"it has ended at once; {place}, and its last lines are", "\n".join(lines))


# ---- ending ------------------------------------------------------------------------------------------------------


def _live_runs(ask: Callable[..., dict[str, Any]]) -> list[str]:
    runs = ask("GET", "/deployments", timeout=10.0)["deployments"]
    return [str(run["instanceName"]) for run in runs if not Phase(run["phase"]).terminal]


def _cancel_runs(running: Running, deadline: float) -> None:
    """Cancel all runs, then wait for each: they need the server until the last rank's grace period is over."""
    ask = functools.partial(request, running.endpoint)
    runs = _live_runs(ask)
    for name in runs:
        ask("POST", f"/deployments/{name}/cancel")
    for name in runs:
        version = 0
        while True:
            wait = min(30.0, deadline - time.monotonic())
            if wait <= 0:
                raise _OutOfTime(f"run {name} is cancelled and has not ended")
            run = ask("GET", f"/deployments/{name}/watch", params={"since": version, "wait": wait})
            if run["distributed"]["settled"]:
                break
            version = run["version"]


def _terminate(running: Running, deadline: float) -> None:
    """Send SIGTERM to exactly that process, and wait for its end."""
    late = _OutOfTime(f"process {running.pid} has been told to stop and has not ended")
    try:
        fd = os.pidfd_open(running.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        os.kill(running.pid, signal.SIGTERM)
        while _is_alive(running):
            if time.monotonic() > deadline:
                raise late from None
            time.sleep(POLL_SECONDS)
        return
    try:
        if not _is_alive(running):  # checked again, now that the descriptor pins the pid
            return
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not _readable(fd, deadline - time.monotonic()):
            raise late
    finally:
        os.close(fd)
