"""Seeded incidents in worlds of two torchrun agents with two workers each, judged by the processes' own diaries.

Each incident is made by a worker itself, by order, or by a signal to its agent or supervisor. Then the control plane
must have said so: one event with the right facts, soon, and one incident with the right culprit, closed once all train.

    python -m tests.e2e.incidents --seed 1 --count 200
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import basilica
from basilica.core import stalls
from basilica.core.ends import UNKNOWN
from basilica.runtimes.local import supervisor
from tests.e2e.chaos import PatientClient
from tests.e2e.server import LastingServer
from tests.support.lockstep import Diaries, Entry, until
from tests.support.server import cli

RANKS, WORKERS = 2, 2
INCIDENTS_A_RUN = 5  # the delay of a rank's restart doubles with each
PATIENCE = 120.0
MEMORY = "800Mi"  # of a rank: enough for an agent that has imported torch
TRAIN_SECONDS = 1.5  # before the next incident: a process must have told its usual step time
KINDS = ("kill", "raise", "exit", "early", "hang", "agent", "supervisor")
IN_PLACE = "torchrun --nproc-per-node=2 --max-restarts=100"
LAUNCHERS = ("torchrun --nproc-per-node=2", IN_PLACE)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """An event that the API shows, and when a client that waits for it had it."""

    at: float
    reason: str
    message: str
    kind: str
    count: int


class Watcher:
    """A client that follows a run, and the events that it has met, each as often as it happened."""

    def __init__(self, server: LastingServer, name: str) -> None:
        self._client, self._name = PatientClient(server), name
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._counts: dict[tuple[str, str], int] = {}
        self.shown: list[Shown] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        version = events_after = 0
        while not self._over.is_set():
            status, answer = self._client.call("GET", f"/deployments/{self._name}/watch?since={version}&wait=2")
            if status != 200:
                return
            version = answer["version"]
            _, told = self._client.call("GET", f"/deployments/{self._name}/events?since={events_after}&limit=500")
            now = time.time()
            events_after = told.get("version", events_after)
            for event in reversed(told.get("events", [])):
                self._take_in(now, event)

    def _take_in(self, now: float, event: Json) -> None:
        key = event["reason"], event["message"]
        with self._lock:
            more = event["count"] - self._counts.get(key, 0)
            self._counts[key] = event["count"]
            if more > 0:
                self.shown.append(Shown(now, *key, event["type"], more))

    def since(self, number: int) -> list[Shown]:
        with self._lock:
            return self.shown[number:]

    def __len__(self) -> int:
        with self._lock:
            return len(self.shown)

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be said of an incident. `event`: reason and pattern; `facts`: of the entry in `incidents`."""

    reason: str
    pattern: str
    facts: Json
    allowed: float = 1.0  # seconds from the fact to the event


@dataclass(slots=True)
class Outcome:
    """One incident that was judged."""

    kind: str
    launcher: str
    latency: float = 0.0
    recovery: float = 0.0  # until all trained again, by the diaries
    closing: float = 0.0  # from then until the incident was closed
    cost: float = 0.0
    faults: list[str] = field(default_factory=list)


class Run:
    """A run of the program under torchrun, on a server of the test's own."""

    def __init__(self, server: LastingServer, folder: Path, launcher: str, **options: Any) -> None:
        self.server, self.launcher = server, launcher
        self.diaries = Diaries(folder)
        self.client = PatientClient(server)
        world = options.pop("world_size", basilica.WorldSize(1, RANKS, RANKS + 1))
        env = {**self.diaries.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        given = {"gpu_count": 0, "grace_seconds": 5, "max_restarts": 50, "memory": MEMORY, "wait": False, **options}
        with basilica.BasilicaClient(server.url, server.key) as client:
            made = client.deploy_distributed(
                None, source=self.diaries.script, launcher=launcher, world_size=world, env=env, **given
            )
            self.name = made.name
        self.watcher = Watcher(server, self.name)

    def view(self) -> Json:
        status, answer = self.client.call("GET", f"/deployments/{self.name}")
        assert status == 200, answer
        return answer

    def incidents(self) -> list[Json]:
        found: list[Json] = self.view()["distributed"]["incidents"]
        return found

    def settle(self, workers: int = RANKS * WORKERS, since: float = 0.0) -> None:
        """Wait until all workers have trained together for a while, and no incident is open."""

        def at_work() -> bool:
            newest = max((entry.mono for entry in self.diaries.find("start")), default=since)
            at = self.diaries.all_step(max(since, newest), workers, workers)
            return at is not None and time.monotonic() - at > TRAIN_SECONDS

        until(at_work, f"{workers} workers at work", PATIENCE)
        until(lambda: all(each.get("overAt") for each in self.incidents()), "the end of the incident", PATIENCE)

    def close(self) -> None:
        self.watcher.close()
        self.client.call("DELETE", f"/deployments/{self.name}?wait=10")


def judge(run: Run, kind: str, rank: int, worker: int, *, n: int, slack: float = 0.0) -> Outcome:
    """Make one incident, and return what was found. `slack`: seconds that an event may be late on a busy machine."""
    outcome = Outcome(kind, run.launcher)
    run.settle()
    before, events, began = run.incidents(), len(run.watcher), time.monotonic()
    fact = _strike(run, kind, rank, worker, n)
    expected = expect(kind, rank, worker, n, fact)
    found = _event(run, events, expected)
    if found is None:
        outcome.faults.append(f"no {expected.reason} {expected.pattern!r}; events: {_said(run, events)}")
    else:
        outcome.latency = found.at - fact.at
    if kind == "hang":
        until(lambda: all(rank.get("stalled") for rank in run.view()["distributed"]["ranks"]), "all to stall", 20)
        time.sleep(0.5)  # each process of a rank is found out by itself
        run.diaries.let_go_on(n)
        began = time.monotonic()
    back = until(lambda: _back(run, kind, fact, began), "training after the incident", PATIENCE)
    outcome.recovery = back - fact.mono
    until(lambda: _closed(run, before), "an incident that is closed", PATIENCE)
    news = [each for each in run.incidents() if each["number"] > len(before)]
    closed_at = moment(news[0]["overAt"]) if news else 0.0
    outcome.closing = closed_at - (time.time() - time.monotonic()) - back
    outcome.faults += _check_incidents(news, expected) + _check_events(run, events, expected, kind)
    outcome.cost = news[0]["costSeconds"] if news else 0.0
    if found is not None and outcome.latency > expected.allowed + slack:
        outcome.faults.append(f"late: {outcome.latency:.2f} s")
    return outcome


def _strike(run: Run, kind: str, rank: int, worker: int, n: int) -> Entry:
    """Make it happen; return the fact with its time."""
    start = max(run.diaries.find("start"), key=lambda entry: (entry.place == (rank, worker), entry.mono))
    if kind in ("agent", "supervisor"):
        pid = start.facts["parent"]
        if kind == "supervisor":
            _orphan(run, pid)
        at, mono = time.time(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return Entry(rank, worker, start.attempt, pid, kind, mono, at, {})
    orders: dict[str, Json] = {"exit": {"code": 3}, "early": {"code": 0}}
    what = "exit" if kind == "early" else kind
    run.diaries.order(rank, worker, what, n, **orders.get(kind, {}))
    taken: Entry = until(lambda: run.diaries.find("order", n=n), "an order that is obeyed")[0]
    if kind != "hang":
        return taken
    mine = [e for e in run.diaries.entries if e.what == "step" and e.pid == taken.pid]
    return max(mine, key=lambda entry: entry.mono)  # its last report


def _orphan(run: Run, pid: int) -> None:
    """Kill the supervisor of the rank with this process; its program goes on, and nothing is said of it."""
    before, events, now = run.incidents(), len(run.watcher), time.monotonic()
    os.kill(_supervisor_of(pid), signal.SIGKILL)
    until(lambda: run.diaries.all_step(now + 1.0, RANKS * WORKERS), "steps without the supervisor", PATIENCE)
    faults = _nothing_new(run, before, events, "a killed supervisor")
    assert not faults, faults


def _supervisor_of(pid: int) -> int:
    while pid > 1:
        head, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        if head.endswith(b"(" + supervisor.NAME):
            return pid
        pid = int(rest.split()[1])
    raise AssertionError("no supervisor")


def expect(kind: str, rank: int, worker: int, n: int, fact: Entry) -> Expected:
    torch_rank = fact.facts.get("torch_rank")
    place = rf"worker {worker} of rank {rank} \(torch rank {torch_rank}\)"
    facts = {"kind": "failure", "rank": rank, "worker": worker, "torchRank": torch_rank, "signal": None}
    match kind:
        case "kill":
            facts |= {"exitCode": 137, "signal": "SIGKILL", "reason": "SIGKILL"}
            return Expected("WorkerFailed", rf"{place} was ended by SIGKILL \(exit code 137\)", facts)
        case "raise":
            facts |= {"exitCode": 1, "reason": "Error"}
            return Expected("WorkerFailed", rf"{place} exited with code 1 \(RuntimeError: boom {n}\)", facts)
        case "exit":
            facts |= {"exitCode": 3, "reason": "Error"}
            return Expected("WorkerFailed", rf"{place} exited with code 3", facts)
        case "early":
            facts |= {"exitCode": 0, "reason": "ExitedEarly"}
            return Expected("WorkerFailed", rf"{place} exited with code 0 before its peers were done", facts)
        case "eat":
            facts |= {"exitCode": 137, "signal": "SIGKILL", "reason": "OOMKilled"}
            return Expected("WorkerFailed", rf"{place} was killed for memory", facts, allowed=PATIENCE)
        case "hang":
            limit = stalls.limit(0.06)
            both = rf"(rank {rank} has|ranks 0 and 1 have) stopped reporting(, rank {rank} first)?;"
            return Expected("RankStalled", both, {"kind": "stall", "rank": rank}, allowed=limit + 1.0)
        case "agent":
            facts |= {"worker": None, "torchRank": None, "exitCode": 137, "signal": "SIGKILL", "reason": "SIGKILL"}
            return Expected("RankFailed", rf"rank {rank} was ended by SIGKILL \(exit code 137\)", facts)
        case _:
            unknown = {"kind": "failure", "rank": rank, "worker": None, "reason": UNKNOWN}
            return Expected("RankFailed", rf"rank {rank} ended, nobody knows how \({UNKNOWN}\)", unknown)


def _event(run: Run, after: int, expected: Expected) -> Shown | None:
    wanted = re.compile(expected.pattern)

    def found() -> Shown | None:
        told = (each for each in run.watcher.since(after) if each.reason == expected.reason)
        return next((each for each in told if wanted.search(each.message)), None)

    with suppress(AssertionError):
        shown: Shown = until(found, "the event", expected.allowed + 20)
        return shown
    return None


def _back(run: Run, kind: str, fact: Entry, began: float) -> float | None:
    """Return when all workers trained again, by their diaries: in processes of their own unless they only hung."""
    firsts: dict[tuple[int, int], float] = {}
    fresh = {e.pid for e in run.diaries.refresh() if e.what == "start" and e.mono > fact.mono}
    for entry in run.diaries.find("step", began):
        if kind == "hang" or entry.pid in fresh:
            firsts.setdefault(entry.place, entry.mono)
    return max(firsts.values()) if len(firsts) == RANKS * WORKERS else None


def _closed(run: Run, before: list[Json]) -> bool:
    after = run.incidents()
    return len(after) > len(before) and all(each.get("overAt") for each in after)


def _check_incidents(news: list[Json], expected: Expected) -> list[str]:
    if len(news) != 1:
        return [f"{len(news)} incidents: {[each['what'] for each in news]}"]
    (one,) = news
    wrong = {name: one.get(name) for name, value in expected.facts.items() if one.get(name) != value}
    faults = [f"the incident has {wrong}, not {expected.facts}: {one['what']}"] if wrong else []
    if one["costSeconds"] <= 0:
        faults.append(f"the incident cost {one['costSeconds']}")
    return faults


def _check_events(run: Run, after: int, expected: Expected, kind: str) -> list[str]:
    """Find warnings of failures that nobody caused, and failures that are told twice."""
    wanted, faults, told = re.compile(expected.pattern), [], 0
    others = {"WorkerFailed"} if kind == "hang" else {"WorkerFailed", "RankStalled"}
    for each in run.watcher.since(after):
        if each.reason == expected.reason and wanted.search(each.message):
            told += each.count
        elif each.reason in others and each.kind == "Warning":
            faults.append(f"invented: {each.message}")
    return faults if told <= 1 else [*faults, f"told {told} times: {_said(run, after)}"]


def _said(run: Run, after: int) -> list[str]:
    return [f"{each.reason}: {each.message}" for each in run.watcher.since(after)]


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- where nothing happens -----------------------------------------------------------------------------------------


def judge_quiet(run: Run, seconds: float) -> list[str]:
    """Return the faults of a phase in which nothing happened."""
    run.settle()
    before, events = run.incidents(), len(run.watcher)
    time.sleep(seconds)
    return _nothing_new(run, before, events, "a quiet phase")


def judge_end(run: Run) -> list[str]:
    """Return the faults of a normal end of all workers."""
    before, events = run.incidents(), len(run.watcher)
    run.diaries.stop()
    run.client.wait(run.name, lambda answer: bool(answer["distributed"]["settled"]))
    until(lambda: any(each.reason == "Succeeded" for each in run.watcher.since(events)), "the last event", 20)
    phase = run.view()["phase"]
    ends = run.diaries.find("end")
    faults = _nothing_new(run, before, events, "a normal end")
    if phase != "succeeded" or len(ends) != RANKS * WORKERS:
        faults.append(f"the run is {phase}, {len(ends)} workers came to their end")
    return faults


def judge_resize(run: Run, size: int, target: int) -> list[str]:
    """Return the faults of a planned resize, which is an incident of its own kind and nobody's failure."""
    run.settle(size * WORKERS)
    before, events, began = run.incidents(), len(run.watcher), time.monotonic()
    status, answer = run.client.call("POST", f"/deployments/{run.name}/scale-distributed", {"target": target})
    assert status == 200, answer
    run.settle(target * WORKERS, began)
    news = run.incidents()[len(before) :]
    faults = [] if [each["kind"] for each in news] == ["resize"] else [f"incidents of a resize: {news}"]
    bad = [e for e in run.watcher.since(events) if e.reason in ("WorkerFailed", "RankFailed") and e.kind == "Warning"]
    return faults + [f"a resize from {size} to {target}: {each.message}" for each in bad]


def _nothing_new(run: Run, before: list[Json], events: int, what: str) -> list[str]:
    news = run.incidents()[len(before) :]
    bad = [e for e in run.watcher.since(events) if e.reason in ("WorkerFailed", "RankFailed", "RankStalled")]
    return [f"{what}: {each['what']}" for each in news] + [f"{what}: {each.message}" for each in bad]


# ---- many ----------------------------------------------------------------------------------------------------------


def limits_memory() -> bool:
    """Return whether this machine's control groups can limit the memory of ranks."""
    return re.search(r"^ok +memory limits", cli("doctor").stdout, re.MULTILINE) is not None


@contextmanager
def arena() -> Iterator[tuple[LastingServer, Path]]:
    directory = Path(tempfile.mkdtemp(prefix="incidents-"))
    server = LastingServer(directory / "state")
    try:
        yield server, directory
    finally:
        server.close()
        shutil.rmtree(directory, ignore_errors=True)


def hunt(
    server: LastingServer,
    directory: Path,
    seed: int,
    count: int,
    tell: Callable[[Outcome], None],
    *,
    kinds: Sequence[str] = (),
) -> tuple[list[Outcome], list[str]]:
    """Judge so many incidents; return them, and the faults of what came between."""
    chance = random.Random(seed)
    kinds = kinds or ([*KINDS, "eat"] if limits_memory() else list(KINDS))
    outcomes: list[Outcome] = []
    faults: list[str] = []
    number = 0
    while number < count:
        launcher = chance.choice(LAUNCHERS)
        run = Run(server, directory / f"{seed}-{number}", launcher)
        try:
            for _ in range(min(INCIDENTS_A_RUN, count - number)):
                number += 1
                kind = chance.choice(kinds)
                place = chance.randrange(RANKS), chance.randrange(WORKERS)
                outcome = judge(run, kind, *place, n=number)
                outcomes.append(outcome)
                tell(outcome)
            faults += judge_quiet(run, 2.0)
            if chance.random() < 0.25:
                faults += judge_resize(run, RANKS, RANKS + 1) + judge_resize(run, RANKS + 1, RANKS)
            faults += judge_end(run)
        except AssertionError as error:
            faults.append(f"run {run.name}, incident {number}: {error} {_context(run)}")
            traceback.print_exc()
        finally:
            run.close()
    return outcomes, faults


def _context(run: Run) -> str:
    with suppress(AssertionError):
        view = run.view()
        return f"{view['distributed']['blockedOn']} {view['distributed']['incidents'][-2:]} {_said(run, 0)[-12:]}"
    return ""


def table(outcomes: list[Outcome]) -> str:
    lines = ["kind        count  right  latency median / max   recovery median   closed after   cost median"]
    for kind in sorted({each.kind for each in outcomes}):
        mine = [each for each in outcomes if each.kind == kind]
        latencies = [each.latency for each in mine]
        lines.append(
            f"{kind:<11} {len(mine):>5}  {sum(not each.faults for each in mine):>5}"
            f"  {statistics.median(latencies):>8.2f} / {max(latencies):<6.2f} s"
            f"   {statistics.median(each.recovery for each in mine):>9.1f} s"
            f"       {statistics.median(each.closing for each in mine):>8.2f} s"
            f"   {statistics.median(each.cost for each in mine):>8.1f} s"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", nargs="*", default=[], choices=[*KINDS, "eat"])
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    given = parser.parse_args()

    def tell(outcome: Outcome) -> None:
        row = f"{outcome.kind:<10} {outcome.latency:6.2f} s  back {outcome.recovery:5.1f} s"
        print(f"{row}  cost {outcome.cost:6.1f} s  {'; '.join(outcome.faults) or 'right'}", flush=True)
        if given.json is not None:
            with given.json.open("a") as file:
                names = ("kind", "launcher", "latency", "recovery", "closing", "cost", "faults")
                file.write(json.dumps({name: getattr(outcome, name) for name in names}) + "\n")

    with arena() as (server, directory):
        outcomes, faults = hunt(server, directory, given.seed, given.count, tell, kinds=given.kinds)
    print(table(outcomes))
    print(*faults, sep="\n")
    return 1 if faults or any(each.faults for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
