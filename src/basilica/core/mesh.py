"""The gate: which hosts of a run may begin to train, and over what. Pure.

A host is ready when every other host of the run answers it and is answered by it. The time that hosts have for that
begins when as many agents as the run needs are up: images that are still being pulled cost nobody his time. One that is
not ready within the limit is let go all the same, as degraded. What converges later turns ready, and what
falls apart later turns degraded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from basilica.core.notices import Notice

FAILING_KEPT = 16
EVERYONE = "every other host"
NO_ANSWER_YET = "no answer yet"


class Gate(StrEnum):
    WAITING = "waiting"
    READY = "ready"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class Pair:
    """One host that got no answer from another. `target` is EVERYONE for a host that has told nothing yet."""

    source: str
    target: str
    problem: str

    def __str__(self) -> str:
        return f"{self.source} cannot reach {self.target}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenMesh:
    """The hosts of a run, and those ways between them that do not work, or not yet.

    `enough`: as many agents are up and heard as the run needs to begin.
    """

    hosts: tuple[str, ...]
    failing: tuple[Pair, ...] = ()
    limit_seconds: float = 30.0
    enough: bool = True


@dataclass(frozen=True, slots=True)
class Announcement:
    """The content of a run's rendezvous for its ranks: how many take part, which hosts may go, by name, and the planned
    change that is ahead of them."""

    world: int
    released: tuple[tuple[str, Gate], ...] = ()
    admitted: int | None = None  # ranks from this one on are not to join the others yet
    notice: Notice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRendezvous:
    """The rendezvous of a run, open. `says` is None if nothing was announced yet.

    `silent_since`: it answered before, and has not since then. What a look shows of ranks is then what was last read.
    """

    endpoint: str
    says: Announcement | None = None
    silent_since: float | None = None


@dataclass(frozen=True, slots=True)
class HostGate:
    host: str
    gate: Gate = Gate.WAITING
    failing_since: float | None = None


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """`failing` are the first few pairs without an answer, of `unanswered` in all.

    `up_since`: when enough agents were up for the first time, from which on the hosts' time counts.
    """

    hosts: tuple[HostGate, ...] = ()
    failing: tuple[Pair, ...] = ()
    unanswered: int = 0
    up_since: float | None = None

    @property
    def ready(self) -> bool:
        return all(host.gate is Gate.READY for host in self.hosts)

    @property
    def degraded(self) -> bool:
        return any(host.gate is Gate.DEGRADED for host in self.hosts)

    @property
    def released(self) -> tuple[tuple[str, Gate], ...]:
        return tuple(sorted((host.host, host.gate) for host in self.hosts if host.gate is not Gate.WAITING))

    @property
    def transport(self) -> Literal["direct-mesh", "hub-relay", "mixed"]:
        """The wire's word for the hosts that were let go: all of them ready, all degraded, or some of each."""
        degraded = sum(gate is Gate.DEGRADED for _, gate in self.released)
        if not degraded:
            return "direct-mesh"
        return "hub-relay" if degraded == len(self.hosts) else "mixed"

    def goes_on(self) -> str:
        """The facts of hosts that were let go without reaching all others."""
        return f"the run goes on although {self.problem() or 'not every host reaches every other'}"

    def problem(self) -> str:
        """The pairs that do not answer, in a sentence; empty if all do."""
        shown = "; ".join(map(str, self.failing[:3]))
        more = self.unanswered - min(3, len(self.failing))
        return f"{shown}; and {more} more" if more > 0 else shown


def failing_pairs(hosts: tuple[str, ...], reports: Mapping[str, Mapping[str, str]]) -> tuple[Pair, ...]:
    """Return the failing pairs, from each host's report of the others: a problem, or nothing if the host answers."""
    failing: list[Pair] = []
    others = set(hosts)
    for source in hosts:
        report = reports.get(source)
        if report is None:
            if len(hosts) > 1:
                failing.append(Pair(source, EVERYONE, NO_ANSWER_YET))
            continue
        wrong = {target: problem for target, problem in report.items() if problem and target in others}
        wrong |= dict.fromkeys(others - report.keys(), NO_ANSWER_YET)
        wrong.pop(source, None)
        failing += [Pair(source, target, wrong[target]) for target in sorted(wrong)]
    return tuple(failing)


def heard(hosts: tuple[str, ...], failing: tuple[Pair, ...]) -> int:
    """Return how many of the hosts' agents have reported. A single host has no other to report on."""
    return len(hosts) - len({pair.source for pair in failing if pair.target == EVERYONE})


def turn(before: MeshStatus | None, seen: SeenMesh, now: float) -> tuple[MeshStatus, float | None]:
    """Return the gate after one observation, and the time of the next."""
    troubled = {host for pair in seen.failing for host in (pair.source, pair.target)}
    if EVERYONE in troubled:
        troubled.update(seen.hosts)
    known = {host.host: host for host in before.hosts} if before is not None else {}
    up_since = None if before is None else before.up_since
    if up_since is None and (seen.enough or any(host.gate is not Gate.WAITING for host in known.values())):
        up_since = now
    limit = seen.limit_seconds if up_since is not None else math.inf
    hosts = tuple(_turn_host(known.get(name, HostGate(name)), name in troubled, limit, now) for name in seen.hosts)
    limits = [
        host.failing_since + seen.limit_seconds
        for host in hosts
        if host.failing_since is not None and host.gate is not Gate.DEGRADED
    ]
    return MeshStatus(hosts, seen.failing[:FAILING_KEPT], len(seen.failing), up_since), min(limits, default=None)


def _turn_host(host: HostGate, troubled: bool, limit: float, now: float) -> HostGate:
    if not troubled:
        return HostGate(host.host, Gate.READY)
    if limit == math.inf:
        return HostGate(host.host, host.gate)
    since = now if host.failing_since is None else min(host.failing_since, now)
    return HostGate(host.host, Gate.DEGRADED if now - since >= limit else host.gate, since)
