"""Hooks on torch's `LocalElasticAgent`: a journal of its workers, and the debug file of its rendezvous.

An agent is one process of a rank, and its workers are the user's processes. The journal is a file of the agent beside
`BASILICA_REPORT_FILE`, from which the control plane learns of them: one JSON object a line, first the process, then its
events (`meeting`, `round`, `exit`, `stopped`), which are numbered. `basilica.reports.agents` reads it and documents the
fields. torch stays in charge of the workers: nothing here signals or reaps a process.

The text of this file also travels to ranks that have no basilica, so it needs the standard library and torch alone, and
keeps to the Python that ranks may have. torch is imported when an agent is made, and not before. A torch without the
expected methods is left alone, and no error of a hook reaches the agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import stat
import threading
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

REPORT_FILE, REPORT_BELL = "BASILICA_REPORT_FILE", "BASILICA_REPORT_BELL"
RANK, ATTEMPT, DEPLOYMENT = "BASILICA_RANK", "BASILICA_ATTEMPT", "BASILICA_DEPLOYMENT"
JOURNAL, DEBUG = ".agent", ".debug"  # how the names of the files end
FILE_BYTES_MAX = 256 << 10  # of each of the two
FILES_KEPT = 8  # of an attempt: an agent may be started again and again by a program of the user's
LINE_BYTES_MAX = 16 << 10
EVENTS_KEPT = 32  # when a journal is full
TRACEBACK_CHARS, MESSAGE_CHARS = 4000, 1000
ERROR_FILE_BYTES_MAX = 1 << 20
# Where the kernel counts its kills for want of memory: cgroup version 2, 1.
MEMORY_EVENTS = ("/sys/fs/cgroup{}/memory.events", "/sys/fs/cgroup/memory{}/memory.oom_control")
ETCD = "torch.distributed.elastic.rendezvous.etcd_rendezvous"
MEETS_BY_ETCD = ("basilica", "etcd")
# What a worker says that fell because a peer was gone, in the words of torch, Gloo, NCCL and the kernel.
ECHO = re.compile(
    r"\bDist\w*Error\b|\bConnection\w*Error\b|\bBrokenPipeError\b|gloo|NCCL|ProcessGroup|TCPStore"
    r"|(?i:connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|socket timeout|failed to recv)"
)
OWN, AS_ECHO, DONE = "own", "echo", "done"
STOPPED_BY = (-signal.SIGTERM, -signal.SIGKILL)
HOOKED, WORKERS = "_basilica_hooks", "_basilica_workers"
# Errors of a hook end here. torch's SignalException is none of them: it is how an agent learns of SIGTERM.
HARMLESS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


# ---- installation --------------------------------------------------------------------------------------------------


def attach(registry: Any) -> None:
    """Install the hooks once an agent of this process asks torch's registry for its rendezvous, by any backend."""
    create = getattr(registry, "create_handler", None)
    if create is None or hasattr(create, HOOKED):
        return

    def create_handler(params: Any) -> Any:
        with contextlib.suppress(*HARMLESS):
            install()
            divert_debug_lines(str(params.backend))
        return create(params)

    setattr(create_handler, HOOKED, True)
    registry.create_handler = create_handler


def install(anyway: bool = False) -> None:
    """Hook the agents of this process, once, if they have a place for a journal; or `anyway`, for `torch_budget`."""
    if not anyway and not os.environ.get(REPORT_FILE):
        return
    try:
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: PLC0415
    except ImportError:  # another torch has it elsewhere
        return
    agents: Any = LocalElasticAgent
    if HOOKED not in vars(agents):
        setattr(agents, HOOKED, True)
        keep_journal(agents)


# ---- the journal ---------------------------------------------------------------------------------------------------


def keep_journal(agents: Any) -> None:
    """Follow the workers of every agent, and write what happens to them to the journal."""
    if not all(hasattr(agents, name) for name in ("_rendezvous", "_start_workers", "_monitor_workers", "_shutdown")):
        return
    meet, start, look, stop = agents._rendezvous, agents._start_workers, agents._monitor_workers, agents._shutdown

    def rendezvous(self: Any, group: Any) -> Any:
        with contextlib.suppress(*HARMLESS):
            _journal.nproc = group.spec.local_world_size
            _journal.add("meeting")
        return meet(self, group)

    def start_workers(self: Any, group: Any) -> Any:
        kills = memory_kills()
        began = time.time()
        ids = start(self, group)
        with contextlib.suppress(*HARMLESS):
            workers = Workers(self._pcontext, {w.local_rank: w.global_rank for w in group.workers}, began, kills)
            setattr(self, WORKERS, workers)
            workers.introduce(group)
        return ids

    def monitor_workers(self: Any, group: Any) -> Any:
        _of(self, Workers.look)
        return look(self, group)

    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stop(self, *args, **kwargs)
        _of(self, Workers.stopped)
        return result

    agents._rendezvous, agents._start_workers = rendezvous, start_workers
    agents._monitor_workers, agents._shutdown = monitor_workers, shutdown


def _of(agent: Any, act: Callable[[Any], None]) -> None:
    workers = getattr(agent, WORKERS, None)
    if workers is not None:
        with contextlib.suppress(*HARMLESS):
            act(workers)


class Workers:
    """The workers of one start, of which those that end by themselves are recorded."""

    def __init__(self, context: Any, torch_ranks: Mapping[int, int], began: float, kills: int) -> None:
        _journal.rounds += 1
        self.fell: dict[int, str] = {}  # the kind of end of each worker that ended by itself
        self._round, self._context, self._torch_ranks = _journal.rounds, context, torch_ranks
        self._began, self._kills = began, kills
        self._pids: dict[int, int] = dict(context.pids())
        self._is_over, self._is_of_functions = False, not getattr(context, "subprocess_handlers", None)
        self._ends = watch_ends(self._pids)
        close = context.close

        def look_and_close(*args: Any, **kwargs: Any) -> Any:
            """torch stops the others from within its poll, which takes up to 30 s: workers that fell come first."""
            with contextlib.suppress(*HARMLESS):
                self.look(closing=True)
            self._is_over = True
            return close(*args, **kwargs)

        context.close = look_and_close

    def introduce(self, group: Any) -> None:
        world = group.workers[0].world_size if group.workers else 0
        _journal.add(
            "round",
            round=self._round,
            group_rank=group.group_rank,
            agents=group.group_world_size,
            world=world,
            workers=[[n, self._torch_ranks[n], pid] for n, pid in sorted(self._pids.items())],
        )

    def stopped(self) -> None:
        if self._context is not None:
            self._context = None
            _journal.add("stopped")

    def look(self, closing: bool = False) -> None:
        """Record the workers that have ended by themselves."""
        if self._is_over or self._context is None:
            return
        codes = {n: returncode(self._context, n) for n in self._pids if n not in self.fell}
        codes = {n: peeked(self._pids[n]) if code is None else code for n, code in codes.items()}
        if closing and self._is_of_functions:  # torch's poll of these stops the others before it closes
            codes = {n: code for n, code in codes.items() if code not in STOPPED_BY}
        seen = time.time(), time.monotonic()
        found = [(*self._end(n, seen), n, code) for n, code in codes.items() if code is not None]
        for at, mono, n, code in sorted(found):
            message, trace = read_error(self._context.error_files.get(n, "")) if code != 0 else ("", "")
            self.fell[n] = DONE if code == 0 else kind_of_fall(code, message)
            _journal.add(
                "exit",
                at=at,
                mono=mono,
                round=self._round,
                worker=n,
                torch_rank=self._torch_ranks[n],
                pid=self._pids[n],
                code=code,
                memory_kills=max(0, memory_kills() - self._kills),
                kind=self.fell[n],
                message=" ".join(message.split())[:MESSAGE_CHARS],
                traceback=trace[-TRACEBACK_CHARS:],
                seen_at=seen[0],
            )

    def _end(self, n: int, seen: tuple[float, float]) -> tuple[float, float]:
        """The moment at which the worker failed, on both clocks.

        A program that raises may take seconds to end, in which its peers fall as well: the moment of the exception is
        that of torch's error file. Whole seconds are those of a file system that knows no others.
        """
        at, mono = min(self._ends.get(n, seen), seen)
        with contextlib.suppress(OSError):
            found = os.stat(self._context.error_files[n])
            raised = found.st_mtime
            if stat.S_ISREG(found.st_mode) and raised % 1 and self._began <= raised < at:
                return raised, mono - (at - raised)
        return at, mono


def returncode(context: Any, n: int) -> int | None:
    """The exit code that torch has found for a worker; None while it has not."""
    handlers = getattr(context, "subprocess_handlers", None)
    process = handlers[n].proc if handlers else context._pc.processes[n]._popen
    code: int | None = process.returncode
    return code


def peeked(pid: int) -> int | None:
    """The exit code of a child that ended and was not reaped, which it is not here either; None for any other."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if found is None or found.si_pid != pid:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def watch_ends(pids: Mapping[int, int]) -> dict[int, tuple[float, float]]:
    """A mapping that gets the moment at which each process ends, on both clocks: torch looks at intervals only.

    A kernel or a container without pidfds leaves it empty.
    """
    ends: dict[int, tuple[float, float]] = {}
    watched: dict[int, int] = {}
    with contextlib.suppress(OSError, AttributeError):
        for n, pid in pids.items():
            watched[os.pidfd_open(pid)] = n

    def watch() -> None:
        poll = select.poll()
        with contextlib.suppress(*HARMLESS):
            for fd in watched:
                poll.register(fd, select.POLLIN)
            while watched:
                for fd, _ in poll.poll():
                    ends[watched.pop(fd)] = time.time(), time.monotonic()
                    poll.unregister(fd)
                    os.close(fd)

    if watched:
        threading.Thread(target=watch, name="basilica-ends", daemon=True).start()
    return ends


def read_error(path: str) -> tuple[str, str]:
    """The message and the traceback in torch's error file; empty texts where there is none."""
    try:
        with open(path, "rb") as file:
            message = json.loads(file.read(ERROR_FILE_BYTES_MAX))["message"]
    except HARMLESS:
        return "", ""
    if not isinstance(message, dict):
        return str(message), ""
    more = message.get("extraInfo")
    trace = more.get("py_callstack") if isinstance(more, dict) else None
    return str(message.get("message", "")), trace if isinstance(trace, str) else ""


def kind_of_fall(code: int, message: str) -> str:
    """The kind of one worker's fall. NCCL's watchdog aborts a worker whose peer does not answer."""
    return AS_ECHO if code == -signal.SIGABRT or ECHO.search(message) else OWN


def memory_kills() -> int:
    """The kernel's count of kills for want of memory in the control group of this process; 0 if it has none."""
    for path in _memory_events():
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            counts = [line.split() for line in file.read(4096).splitlines()]
            return sum(int(each[1]) for each in counts if len(each) == 2 and each[0] == "oom_kill")
    return 0


def _memory_events() -> Iterator[str]:
    given = os.environ.get("BASILICA_MEMORY_EVENTS")
    if given:
        yield given
    version_2, version_1 = MEMORY_EVENTS
    with contextlib.suppress(OSError, ValueError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file.read().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                yield (version_2 if number == "0" else version_1).format(path.rstrip("/"))
    for place in MEMORY_EVENTS:  # in a container whose control group has another name inside
        yield place.format("")


class Journal:
    """The journal of this process. Each event is one write, so a reader meets whole lines or a torn last one."""

    def __init__(self) -> None:
        self.nproc = 0
        self.rounds = 0
        self._pid = self._events = self._size = 0
        self._fd = -1
        self._head = b""
        self._recent: deque[bytes] = deque(maxlen=EVENTS_KEPT)

    def add(self, event: str, at: float | None = None, mono: float | None = None, **fields: Any) -> None:
        path = os.environ.get(REPORT_FILE)
        if not path:
            return
        if self._pid != os.getpid():  # a fork is another agent
            nproc, rounds = self.nproc, self.rounds
            Journal.__init__(self)
            self._pid, self.nproc, self.rounds = os.getpid(), nproc, rounds
        self._events += 1
        at, mono = time.time() if at is None else at, time.monotonic() if mono is None else mono
        line = line_of({"n": self._events, "at": round(at, 6), "mono": round(mono, 6), "event": event, **fields})
        self._recent.append(line)
        with contextlib.suppress(OSError):  # a full disk: an event that is lost is a gap in the numbers
            self._write(path, line)
        ring(self._pid)

    def _write(self, path: str, line: bytes) -> None:
        if self._fd < 0:
            self._fd = open_own_file(path, JOURNAL)
            about = {"pid": self._pid, "start": start_of_this_process(), "nproc": self.nproc}
            self._head = json.dumps(about).encode() + b"\n"
            self._rewrite()
        elif self._size + len(line) > FILE_BYTES_MAX:
            self._rewrite()
        elif os.pwrite(self._fd, line, self._size) == len(line):  # else there is no room, and the next write is here
            self._size += len(line)

    def _rewrite(self) -> None:
        """In place: readers drop the events that they know. Half of the file stays free for the next ones."""
        whole = self._head
        for number in range(len(self._recent)):
            kept = b"".join(list(self._recent)[number:])
            if len(kept) <= FILE_BYTES_MAX // 2:
                whole += kept
                break
        self._size = os.pwrite(self._fd, whole, 0)
        os.ftruncate(self._fd, self._size)


def line_of(fields: dict[str, Any]) -> bytes:
    """The event as a line. What makes it too long is cut: the beginning of a traceback, the end of anything else."""
    while True:
        line = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        name = max(("traceback", "message", "workers"), key=lambda name: len(fields.get(name, "")))
        half = len(fields.get(name, "")) // 2
        if len(line) <= LINE_BYTES_MAX or name not in fields:
            return line
        fields[name] = fields[name][len(fields[name]) - half :] if name == "traceback" else fields[name][:half]


def open_own_file(path: str, ending: str) -> int:
    """Open the file of this process with that ending, and remove the oldest of the attempt."""
    directory, name = os.path.split(path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    alike = re.compile(re.escape(name) + r"\.[0-9]+" + re.escape(ending))
    with contextlib.suppress(OSError):
        found = [entry for entry in os.scandir(directory) if alike.fullmatch(entry.name)]
        found.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
        for entry in found[: max(0, len(found) - FILES_KEPT + 1)]:
            os.unlink(entry.path)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.open(f"{path}.{os.getpid()}{ending}", flags, 0o600)


def start_of_this_process() -> int | None:
    """The start time, which identifies this process together with its pid; None if the system has none."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def ring(pid: int) -> None:
    """Notify the control plane, if it listens. One that starts later reads the files itself."""
    bell = os.environ.get(REPORT_BELL)
    if not bell:
        return
    who = " ".join(os.environ.get(name, "") for name in (DEPLOYMENT, RANK, ATTEMPT))
    with contextlib.suppress(OSError):
        fd = os.open(bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, f"\n{who} agent {pid}\n".encode())
        finally:
            os.close(fd)


_journal = Journal()


# ---- the debug file ------------------------------------------------------------------------------------------------


def divert_debug_lines(backend: str) -> None:
    """Let torch's lines on each step of a rendezvous by etcd go to a file of this process, unless the user wants them.

    torch's module has a console handler of its own that prints them, whatever level others have. Warnings stay there.
    """
    path, asked = os.environ.get(REPORT_FILE), ("LOGLEVEL", "TORCH_CPP_LOG_LEVEL")
    if not path or backend not in MEETS_BY_ETCD:
        return
    if any(os.environ.get(name, "").upper() in ("INFO", "DEBUG", "NOTSET") for name in asked):
        return
    import importlib  # noqa: PLC0415

    importlib.import_module(ETCD)  # it adds its handler when it is imported
    logger = logging.getLogger(ETCD)
    consoles = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
    if not consoles or hasattr(logger, HOOKED):
        return
    setattr(logger, HOOKED, True)
    debug = DebugFile(open_own_file(path, DEBUG))
    debug.setFormatter(consoles[0].formatter)
    logger.addHandler(debug)
    for console in consoles:
        console.setLevel(max(console.level, logging.WARNING))


class DebugFile(logging.Handler):
    """A bounded file of log lines, of which the newest are kept."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd, self._size = fd, 0

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(*HARMLESS):
            line = self.format(record).encode("utf-8", "replace")[: LINE_BYTES_MAX - 1] + b"\n"
            if self._size + len(line) > FILE_BYTES_MAX:
                kept = os.pread(self._fd, FILE_BYTES_MAX // 2, self._size - FILE_BYTES_MAX // 2)
                kept = kept[kept.find(b"\n") + 1 :]
                os.ftruncate(self._fd, 0)
                self._size = os.pwrite(self._fd, kept, 0)
            self._size += os.pwrite(self._fd, line, self._size)
