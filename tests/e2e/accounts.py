"""The ledger of a run against the account that its own processes keep: who did what, and for how long.

Every process of the program writes when it began (by the kernel's own record), took each step, and whether it knew the
step from before, when it hung and went on, and when it ended. The observer adds when it asked for a resize, and when
each process ended (by a pidfd). From these, and from nothing that the control plane says but the two ends of the
run, the seconds of every cause are added up and compared.

    python -m tests.e2e.accounts --seed 1 --count 50

What workers cannot tell apart is compared as a sum. `queued`, `starting` and `rendezvous` are one cause ("starting"),
but for a rank whose agent lives on, which then meets the others: that is `rendezvous`, and with torchrun both are in
the sum, since an agent's workers do not see it import torch.
"""

import argparse
import itertools
import os
import random
import select
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import basilica
from basilica.core import policy, stalls
from tests.e2e.incidents import Run, arena, moment
from tests.e2e.server import LastingServer
from tests.support.lockstep import STEP_SECONDS, Entry, until

MERGED = {"queued": "starting", "rendezvous": "starting"}
GOAL = 0.01  # of the seconds of all ranks
RANKS = 2
TORCHRUN = "torchrun --nproc-per-node=2"
LAUNCHERS = ("python", TORCHRUN)
STALL_LIMIT = stalls.limit(STEP_SECONDS)

Account = defaultdict[str, float]


@dataclass(slots=True)
class Observed:
    """What the observer knows by itself: the sizes of the world with their times, and the ends of processes."""

    sizes: list[tuple[float, int]] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    _watched: set[int] = field(default_factory=set)

    def watch(self, entries: list[Entry]) -> None:
        """Follow every process that has begun a diary, and its parent: with torchrun, that is its agent."""
        starts = [entry for entry in entries if entry.what == "start"]
        for pid in {pid for entry in starts for pid in (entry.pid, entry.facts["parent"])} - self._watched:
            self._watched.add(pid)
            with suppress(ProcessLookupError):
                threading.Thread(target=self._wait, args=(pid, os.pidfd_open(pid)), daemon=True).start()

    def _wait(self, pid: int, fd: int) -> None:
        select.select([fd], [], [])
        self.ends[pid] = time.monotonic()
        os.close(fd)

    def end_of(self, life: "Life") -> float:
        return max(self.ends.get(life.start.pid, 0.0), life.entries[-1].mono)


@dataclass(slots=True)
class Life:
    """One process of the program."""

    start: Entry
    entries: list[Entry]

    @property
    def steps(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.what == "step"]

    @property
    def how(self) -> str:
        last = self.entries[-1]
        if last.what == "order":
            return "finished" if last.facts.get("code") == 0 else "degraded"
        return {"end": "finished", "stopped": "changing"}.get(last.what, "degraded")

    def trains(self, until: float) -> Iterator[tuple[str, float, float]]:
        """Yield what the process did from its first step until then."""
        steps = self.steps
        if not steps:
            return
        new = next((step.mono for step in steps if step.facts["new"]), until)
        if not steps[0].facts["new"]:
            yield "recomputing", steps[0].mono, min(new, until)
        at = max(new, steps[0].mono)
        for one, other in itertools.pairwise([*(step.mono for step in steps if step.mono >= at), until]):
            yield ("stalled" if other - one > STALL_LIMIT else "training"), one, other


def lives_of(entries: list[Entry], rank: int, worker: int = 0) -> list[Life]:
    found: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.place == (rank, worker):
            found[entry.pid].append(entry)
    lives = [Life(mine[0], mine) for mine in found.values() if mine[0].what == "start"]
    return sorted(lives, key=lambda life: life.start.mono)


def own_account(entries: list[Entry], observed: Observed, began: float, over: float, *, agents: bool) -> Account:
    """Return the seconds of every cause by the processes' own account, of a run between these monotonic times."""
    account: Account = defaultdict(float)
    sizes = [(began, observed.sizes[0][1]), *observed.sizes[1:]]
    for rank in range(max(size for _, size in sizes)):
        spans = of_agents(entries, observed, rank) if agents else of_program(entries, observed, rank)
        for (since, size), (to, _) in itertools.pairwise([*sizes, (over, 0)]):
            if rank < size:
                for cause, one, other in charged(spans, since, to):
                    account[cause] += other - one
    return account


def charged(spans: list[tuple[str, float, float]], since: float, to: float) -> Iterator[tuple[str, float, float]]:
    """Yield the spans between two moments; before the first one the rank starts, and the last one goes on."""
    first = spans[0][1] if spans else to
    last = spans[-1] if spans else ("starting", to, to)
    for cause, one, other in [("starting", since, first), *spans, (last[0], last[2], to)]:
        if min(other, to) > max(one, since):
            yield cause, max(one, since), min(other, to)


def of_program(entries: list[Entry], observed: Observed, rank: int) -> list[tuple[str, float, float]]:
    """Return what a rank did whose program is its own process, without a gap."""
    spans: list[tuple[str, float, float]] = []
    restarts = 0
    stops = [observed.end_of(life) for other in {e.rank for e in entries} for life in lives_of(entries, other)]
    for life in lives_of(entries, rank):
        if spans:
            cause, end = spans[-1][0], spans[-1][2]
            gone = max(stop for stop in stops if stop <= life.start.mono)  # a gang starts when the last one is gone
            due = gone if cause == "changing" else end + policy.restart_delay(restarts)
            spans += between(cause, end, due, life.start.mono)
        last = life.entries[-1].mono if life.how == "changing" else observed.end_of(life)
        restarts = restarts + 1 if life.how == "degraded" else 0
        first = life.steps[0].mono if life.steps else last
        spans += [("starting", life.start.mono, first), *life.trains(last), (life.how, last, last)]
    return spans


def between(cause: str, end: float, due: float, start: float) -> list[tuple[str, float, float]]:
    """Return the time between two processes. The pause after a failure is as long as the rule says."""
    return [(cause, end, min(due, start)), ("starting", min(due, start), start)]


def of_agents(entries: list[Entry], observed: Observed, rank: int) -> list[tuple[str, float, float]]:
    """Return what a rank did whose agent runs two workers, of which the first one stands for both."""
    spans: list[tuple[str, float, float]] = []
    lives = lives_of(entries, rank)
    peers = lives_of(entries, rank, 1)
    restarts = 0
    for number, life in enumerate(lives):
        agent = life.start.facts["parent"]
        if spans and spans[-1][2] < life.start.mono:
            spans.append((spans[-1][0], spans[-1][2], life.start.mono))
        following = lives[number + 1].start.mono if number + 1 < len(lives) else float("inf")
        beside = [observed.end_of(peer) for peer in peers if life.start.mono - 1 < peer.start.mono < following - 0.02]
        end = max([observed.end_of(life), *beside])
        first = life.steps[0].mono if life.steps else end
        spans += [("starting", life.start.mono, first), *life.trains(end)]
        gone = observed.ends.get(agent, float("inf"))
        if gone < following:
            after = "finished" if life.how == "finished" else "degraded"
            spans += [("starting" if after == "degraded" else after, end, gone), (after, gone, gone)]
            restarts += 1
            if number + 1 < len(lives):
                spans += between(after, gone, gone + policy.restart_delay(restarts), following)
        else:
            spans.append(("starting", end, end))  # its agent meets the others again
    return spans


# ---- one run -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Comparison:
    launcher: str
    what: list[str]
    ranks_seconds: float
    own: Account
    ledger: Account
    sum_error: float
    fault: str = ""

    @property
    def errors(self) -> dict[str, float]:
        """The difference of every cause, as a share of the seconds of all ranks."""
        causes = {*self.own, *self.ledger}
        return {cause: (self.ledger[cause] - self.own[cause]) / self.ranks_seconds for cause in sorted(causes)}

    @property
    def worst(self) -> float:
        return max((abs(error) for error in self.errors.values()), default=1.0)


def compare(server: LastingServer, folder: Path, launcher: str, seed: int) -> Comparison:
    """Let a run live through some incidents, and compare both accounts."""
    chance = random.Random(seed)
    agents = launcher != "python"
    run = Run(server, folder, launcher, world_size=basilica.WorldSize(1, RANKS, RANKS + 1))
    observed = Observed(sizes=[(0.0, RANKS)])
    done: list[str] = []
    try:
        size = RANKS
        for number in range(chance.randint(1, 3)):
            _train(run, observed, size * (2 if agents else 1), chance.uniform(1.0, 3.0))
            what = chance.choice(["kill", "raise", "hang", "resize"])
            done.append(what)
            if what == "resize":
                size = RANKS + 1 if size == RANKS else RANKS
                _resize(run, observed, size)
                continue
            rank, worker = chance.randrange(size), chance.randrange(2 if agents else 1)
            run.diaries.order(rank, worker, what, number)
            until(partial(run.diaries.find, "order", n=number), "an order that is obeyed")
            if what == "hang":
                time.sleep(STALL_LIMIT + chance.uniform(1.0, 3.0))
                run.diaries.let_go_on(number)
        _train(run, observed, size * (2 if agents else 1), 1.5)
        if not agents and chance.random() < 0.5:
            done.append("finish")
            run.diaries.order(chance.randrange(size), 0, "exit", 99, code=0)
            time.sleep(chance.uniform(1.0, 2.0))
        run.diaries.stop()
        view = run.client.wait(run.name, lambda answer: bool(answer["distributed"]["settled"]))
        return _compared(run, observed, view, done, agents=agents)
    finally:
        run.close()


def _train(run: Run, observed: Observed, places: int, seconds: float) -> None:
    began = time.monotonic()

    def trained() -> bool:
        observed.watch(run.diaries.refresh())
        at = run.diaries.all_step(began, places)
        return at is not None and time.monotonic() - at > seconds

    until(trained, f"{places} processes that train")


def _resize(run: Run, observed: Observed, target: int) -> None:
    status, answer = run.client.call("POST", f"/deployments/{run.name}/scale-distributed", {"target": target})
    assert status == 200, answer
    observed.sizes.append((time.monotonic(), target))


def _compared(run: Run, observed: Observed, view: dict[str, Any], done: list[str], *, agents: bool) -> Comparison:
    goodput = view["distributed"]["goodput"]
    began = moment(view["createdAt"]) - (time.time() - time.monotonic())
    over = began + goodput["wallSeconds"]
    own = own_account(run.diaries.refresh(), observed, began, over, agents=agents)
    ledger: Account = defaultdict(float)
    for cause, seconds in goodput["seconds"].items():
        ledger[MERGED.get(cause, cause)] += seconds
    sizes = [(began, RANKS), *observed.sizes[1:], (over, 0)]
    wanted = sum(size * (to - since) for (since, size), (to, _) in itertools.pairwise(sizes))
    return Comparison(run.launcher, done, goodput["rankSeconds"], own, ledger, goodput["rankSeconds"] - wanted)


# ---- many ----------------------------------------------------------------------------------------------------------


def table(found: list[Comparison]) -> str:
    lines = []
    for launcher in sorted({each.launcher for each in found}):
        mine = [each for each in found if each.launcher == launcher]
        within = sum(each.worst <= GOAL for each in mine)
        total = sum(each.ranks_seconds for each in mine)
        lines.append(
            f"{launcher}: {len(mine)} runs, {total:.0f} rank-seconds, {within} within {GOAL:.0%} in each cause"
        )
        lines.append("cause           own s    ledger s   error of all   largest of a run")
        for cause in sorted({cause for each in mine for cause in each.errors}):
            own, ledger = sum(each.own[cause] for each in mine), sum(each.ledger[cause] for each in mine)
            largest = max((each.errors.get(cause, 0.0) for each in mine), key=abs)
            lines.append(
                f"{cause:<12} {own:>9.2f}  {ledger:>9.2f}   {(ledger - own) / total:>10.2%}   {largest:>10.2%}"
            )
        lines.append(f"sum: at most {max(abs(each.sum_error) for each in mine):.3f} s beside wall x target")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--launchers", nargs="*", default=LAUNCHERS)
    given = parser.parse_args()
    found: list[Comparison] = []
    faults = 0
    with arena() as (server, directory):
        for number in range(given.count):
            seed = 1000 * given.seed + number
            launcher = given.launchers[number % len(given.launchers)]
            try:
                one = compare(server, directory / str(seed), launcher, seed)
            except AssertionError:
                faults += 1
                traceback.print_exc()
                continue
            found.append(one)
            errors = ", ".join(f"{cause} {error:+.2%}" for cause, error in one.errors.items() if abs(error) > 0.001)
            place = f"{seed} {launcher.split()[0]:<8} {one.ranks_seconds:6.1f} s {' '.join(one.what):<24}"
            print(f"{place} worst {one.worst:.2%} sum {one.sum_error:+.3f} s  {errors}", flush=True)
    print(table(found))
    return 1 if faults or any(each.worst > GOAL for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
