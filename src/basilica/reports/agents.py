"""The journals of torchrun agents as their readers see them, one each: `reports/<rank>.<attempt>.<pid>.agent`.

`rendezvous.torch_agent` writes them in the rank's own processes, so a journal may contain anything: lines of another
form are dropped. A journal that is full is rewritten in place, so a reader may meet an event twice, and not the oldest.

The first line is `{"pid", "start", "nproc"}`, every other an event:

    {"n", "at", "mono", "event": "meeting"}    the agent enters the rendezvous, and has no workers
    {…, "event": "round", "round", "group_rank", "agents", "world", "workers": [[local rank, torch rank, pid], …]}
    {…, "event": "exit", "round", "worker", "torch_rank", "pid", "code", "memory_kills", "kind", "message", "traceback",
     "seen_at"}                                a worker ended by itself
    {…, "event": "stopped"}                    the agent has stopped its workers
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from basilica.machine import files as door
from basilica.machine.layout import Key, Layout
from basilica.rendezvous.torch_agent import FILE_BYTES_MAX, LINE_BYTES_MAX, MESSAGE_CHARS, TRACEBACK_CHARS
from basilica.reports.points import TIME_MAX

FILES_MAX = 64  # of an attempt; our writer keeps fewer
READ_BYTES_MAX = 2 * FILE_BYTES_MAX  # any program may have written it
NUMBER_MAX, START_MAX = 1 << 31, 1 << 63
WORKERS_MAX = 1024

_FOREIGN = (KeyError, TypeError, ValueError, RecursionError)  # what a line of another form raises
_KINDS: tuple[tuple[str, ...], ...] = (("done",), ("own", "echo"))  # of an exit code 0, and of any other
_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})\.agent")
Kind = Literal["own", "echo", "done"]


@dataclass(frozen=True, slots=True)
class JournalFile:
    """The journal of one agent of one attempt."""

    key: Key
    pid: int
    path: str


@dataclass(frozen=True, slots=True)
class Meeting:
    """The agent entered the rendezvous."""

    n: int
    at: float
    mono: float


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that was started; `torch_rank` is its RANK."""

    local_rank: int
    torch_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The agent started its workers, for the `round`-th time; it is `group_rank` of `agents`."""

    n: int
    at: float
    mono: float
    round: int
    group_rank: int
    agents: int
    world: int
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker ended by itself.

    `at` is the moment of its exception where torch's error file has one, else that of its end; `seen_at` is when the
    agent found out. `code` is negative for a signal. `kind` is "echo" for a worker that names a lost peer.
    """

    n: int
    at: float
    mono: float
    round: int
    worker: int
    torch_rank: int
    pid: int
    code: int
    memory_kills: int
    kind: Kind
    message: str
    traceback: str
    seen_at: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The agent stopped its workers."""

    n: int
    at: float
    mono: float


Event = Meeting | RoundStarted | WorkerExit | Stopped


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of a journal, its events in order. `start` is when the agent started, as the kernel counts."""

    pid: int
    start: int | None
    nproc: int
    events: tuple[Event, ...]


def journal_file(layout: Layout, key: Key, pid: int) -> JournalFile:
    return JournalFile(key, pid, f"{layout.report(key)}.{pid}.agent")


def journal_files(layout: Layout, instance: str) -> list[JournalFile]:
    """Return the journals of all agents of the run; of an attempt with too many, none."""
    try:
        names = door.names(str(layout.reports(instance)), keep=lambda name: _NAME.fullmatch(name) is not None)
    except OSError:  # no directory yet, or the rank put another file in its place
        return []
    by_attempt: dict[Key, list[JournalFile]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            key = Key(instance, int(match[1]), int(match[2]))
            by_attempt.setdefault(key, []).append(journal_file(layout, key, int(match[3])))
    return [file for found in by_attempt.values() if len(found) <= FILES_MAX for file in found]


def read_journal(path: str) -> Journal | None:
    """Return the journal; None if there is none that can be read. The agent may be writing it meanwhile."""
    try:
        with door.opened(path) as fd:
            data = door.read_at(fd, 0, READ_BYTES_MAX)
    except OSError:
        return None
    return parse_journal(data)


def parse_journal(data: bytes) -> Journal | None:
    """Return the journal of that content; None without a first line."""
    head, *lines = data.split(b"\n")[:-1] or [b""]  # what follows the last line is torn
    try:
        about = _object(head)
        start = None if about["start"] is None else _number(about["start"], START_MAX)
        pid, nproc = _number(about["pid"]), _number(about["nproc"])
    except _FOREIGN:
        return None
    events: dict[int, Event] = {}
    for line in lines:
        with suppress(*_FOREIGN):
            event = _event(_object(line))
            events.setdefault(event.n, event)
    return Journal(pid, start, nproc, tuple(events[n] for n in sorted(events)))


def _object(line: bytes) -> dict[str, Any]:
    found = json.loads(line) if len(line) < LINE_BYTES_MAX else None
    if not isinstance(found, dict):
        raise TypeError("no JSON object of a permitted length")
    return found


def _event(fields: dict[str, Any]) -> Event:
    """Return the event; raise one of `_FOREIGN` for a line that our writer cannot have written."""
    n, at, mono = _number(fields["n"]), _time(fields["at"]), _time(fields["mono"])
    match fields["event"]:
        case "meeting":
            return Meeting(n, at, mono)
        case "round":
            return RoundStarted(
                n=n,
                at=at,
                mono=mono,
                round=_number(fields["round"]),
                group_rank=_number(fields["group_rank"]),
                agents=_number(fields["agents"]),
                world=_number(fields["world"]),
                workers=tuple(_worker(*each) for each in fields["workers"][:WORKERS_MAX]),
            )
        case "exit":
            return WorkerExit(
                n=n,
                at=at,
                mono=mono,
                round=_number(fields["round"]),
                worker=_number(fields["worker"]),
                torch_rank=_number(fields["torch_rank"]),
                pid=_number(fields["pid"]),
                code=_code(fields["code"], fields["kind"]),
                memory_kills=_number(fields["memory_kills"]),
                kind=fields["kind"],
                message=" ".join(_text(fields["message"]).split())[:MESSAGE_CHARS],
                traceback=_text(fields["traceback"])[-TRACEBACK_CHARS:],
                seen_at=_time(fields["seen_at"]),
            )
        case "stopped":
            return Stopped(n, at, mono)
        case other:
            raise ValueError(other)


def _worker(local_rank: Any, torch_rank: Any, pid: Any) -> Worker:
    return Worker(_number(local_rank), _number(torch_rank), _number(pid))


def _number(found: Any, below: int = NUMBER_MAX) -> int:
    if type(found) is not int or not 0 <= found < below:
        raise ValueError(found)
    return found


def _code(found: Any, kind: Any) -> int:
    """Return an exit code: 0 for a worker that is done, and for no other."""
    if type(found) is not int or abs(found) >= NUMBER_MAX or kind not in _KINDS[found != 0]:
        raise ValueError(found)
    return found


def _time(found: Any) -> float:
    if type(found) not in (int, float) or not 0 <= found < TIME_MAX:
        raise ValueError(found)
    return float(found)


def _text(found: Any) -> str:
    """Return a text that can be stored: half a surrogate pair cannot."""
    if type(found) is not str:
        raise TypeError(found)
    return found.encode("utf-8", "replace").decode()
