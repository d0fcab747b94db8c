"""The hosts that ranks run on: this machine, or several network namespaces of it that stand for machines."""

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from basilica.core.mesh import SeenMesh, heard
from basilica.core.world import WorldSize
from basilica.rendezvous.pairs import PairReports

LOOPBACK = "127.0.0.1"
MESH_LIMIT_S = 30.0  # below the minute that ranks wait at the gate, so that they receive the verdict


@dataclass(frozen=True, slots=True)
class Host:
    """A host of ranks. `enter` is the command prefix that runs a command there; other hosts reach it at `address`."""

    name: str
    address: str = LOOPBACK
    enter: tuple[str, ...] = ()


@dataclass(slots=True)
class _Watched:
    reports: PairReports
    task: asyncio.Task[None]
    agents: dict[Host, subprocess.Popen[bytes]] = field(default_factory=dict)


class Hosts:
    """The hosts of all runs: rank r runs on host r modulo their number. Several hosts are checked for reachability."""

    def __init__(self, hosts: Sequence[Host], *, python: str, limit_seconds: float = MESH_LIMIT_S) -> None:
        self._hosts, self._python, self._limit = tuple(hosts), python, limit_seconds
        self._watched: dict[str, _Watched] = {}

    def of_rank(self, rank: int) -> Host:
        return self._hosts[rank % len(self._hosts)]

    def _of_world(self, size: int) -> tuple[Host, ...]:
        return self._hosts[:size]

    def mesh(self, instance: str, world: WorldSize) -> SeenMesh:
        """Return the state of the network between the hosts of a run of that size."""
        names = tuple(host.name for host in self._of_world(world.target))
        watched = self._watched.get(instance)
        reports = watched.reports if watched is not None else PairReports("", lambda: None)
        failing = reports.failing(names)
        enough = heard(names, failing) >= len(self._of_world(world.min))
        return SeenMesh(hosts=names, failing=failing, limit_seconds=self._limit, enough=enough)

    def watch(self, instance: str, size: int, endpoint: str, wake: Callable[[str], None]) -> None:
        """Have each host of the run report the other hosts that it reaches. A single host reports nothing."""
        hosts = self._of_world(size)
        if len(hosts) == 1:
            return
        watched = self._watched.get(instance)
        if watched is None:
            reports = PairReports(endpoint, lambda: wake(instance))
            task = asyncio.create_task(reports.run(), name=f"pairs-{instance}")
            watched = self._watched[instance] = _Watched(reports, task)
        for host in hosts:
            if host not in watched.agents or watched.agents[host].poll() is not None:
                watched.agents[host] = self._start_agent(host, endpoint)

    def _start_agent(self, host: Host, endpoint: str) -> subprocess.Popen[bytes]:
        """Start an agent, which replaces the one of an earlier server, and ends with the run's rendezvous."""
        command = [*host.enter, self._python, "-P", "-m", "basilica.rank.reachability", "--node", host.name]
        return subprocess.Popen(
            [*command, "--address", host.address, "--endpoint", endpoint],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")},
            start_new_session=True,
        )

    async def forget(self, instance: str) -> None:
        """Stop the agents of a run that is over, or of a server that closes."""
        watched = self._watched.pop(instance, None)
        if watched is None:
            return
        watched.task.cancel()
        await asyncio.gather(watched.task, return_exceptions=True)
        for agent in watched.agents.values():
            with suppress(ProcessLookupError):
                agent.kill()
            await asyncio.to_thread(agent.wait)

    async def close(self) -> None:
        for instance in tuple(self._watched):
            await self.forget(instance)
