"""Hosts that are network namespaces, each pair of them joined by a cable of its own that can be cut.

Made within a network namespace of the test's own (`unshare --net --mount`), where nothing else can see it, and gone
with it. The process that makes it is the machine of the control plane; every host has a cable to that, too.
"""

import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path

from basilica.runtimes.local.hosts import Host

CONTROL = "10.77.0.1"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


class Network:
    def __init__(self, names: Sequence[str]) -> None:
        """Every host reaches every other, and the control plane."""
        Path("/run/netns").mkdir(exist_ok=True)  # a machine without network namespaces has none yet
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run/netns"], check=True)
        ip("link", "set", "lo", "up")
        ip("address", "add", f"{CONTROL}/32", "dev", "lo")
        self.addresses = {name: f"10.77.0.{10 + number}" for number, name in enumerate(names)}
        for number, (name, address) in enumerate(self.addresses.items()):
            ip("netns", "add", name)
            self._inside(name, "link", "set", "lo", "up")
            self._inside(name, "address", "add", f"{address}/32", "dev", "lo")
            ip("link", "add", f"c{number}", "type", "veth", "peer", "name", "control", "netns", name)
            ip("link", "set", f"c{number}", "up")
            self._inside(name, "link", "set", "control", "up")
            ip("route", "add", f"{address}/32", "dev", f"c{number}", "src", CONTROL)
            self._inside(name, "route", "add", f"{CONTROL}/32", "dev", "control", "src", address)
        for a, b in itertools.combinations(names, 2):
            ip("-n", a, "link", "add", f"to-{b}", "type", "veth", "peer", "name", f"to-{a}", "netns", b)
            self.heal(a, b)

    def hosts(self) -> list[Host]:
        return [Host(name, address, ("ip", "netns", "exec", name)) for name, address in self.addresses.items()]

    def cut(self, a: str, b: str) -> None:
        self._inside(a, "link", "set", f"to-{b}", "down")

    def heal(self, a: str, b: str) -> None:
        for here, there in ((a, b), (b, a)):
            self._inside(here, "link", "set", f"to-{there}", "up")
        for here, there in ((a, b), (b, a)):
            way = [f"{self.addresses[there]}/32", "dev", f"to-{there}", "src", self.addresses[here]]
            self._inside(here, "route", "replace", *way)

    def delay(self, a: str, b: str) -> None:
        """Each way, by a bottleneck that lets some 500 bytes pass in a second: a packet waits for those before it."""
        for here, there in ((a, b), (b, a)):
            shape = ["tbf", "rate", "4kbit", "burst", "256", "latency", "10s"]
            subprocess.run(["tc", "-n", here, "qdisc", "replace", "dev", f"to-{there}", "root", *shape], check=True)

    def _inside(self, name: str, *arguments: str) -> None:
        ip("-n", name, *arguments)
