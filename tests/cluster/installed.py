"""Basilica on a real cluster, installed as docs/how-to/install-on-kubernetes.md says, and what stories do with it."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from basilica import BasilicaClient

PATIENCE_S = 120.0
CONTROL = "basilica-system"
CLI = [sys.executable, "-m", "basilica.cli.main"]


def kubectl(*arguments: str, given: str | None = None, check: bool = True) -> str:
    done = subprocess.run(
        ["kubectl", *arguments], input=given, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def basilica(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [*CLI, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"basilica {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def until(true: Callable[[], object], what: str, within: float = PATIENCE_S) -> None:
    """Kubernetes tells of most things by a status that is read again."""
    give_up = time.monotonic() + within
    while not true():
        assert time.monotonic() < give_up, f"it never came to this: {what}"
        time.sleep(0.2)


class Installed:
    """The installation, a user of it, and a way to its API."""

    def __init__(self, image: str, plain_image: str, user: str) -> None:
        self.image, self.plain_image, self.user, self.namespace = image, plain_image, user, f"u-{user}"
        self.url = self.key = ""
        self._forwarding: subprocess.Popen[str] | None = None

    def open(self) -> None:
        kubectl("apply", "-f", "-", given=basilica("manifests", "--with-api", "--image", self.image))
        for name in ("basilica-operator", "basilica-api"):
            kubectl("--namespace", CONTROL, "rollout", "status", f"deployment/{name}", f"--timeout={PATIENCE_S:g}s")
        self.key = basilica("keys", "create", "--store", "kubernetes", "--user", self.user).strip()
        self.forward()

    def forward(self) -> None:
        self._stop_forwarding()
        command = ["kubectl", "--namespace", CONTROL, "port-forward", "service/basilica-api", ":80"]
        self._forwarding = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._forwarding.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", self._forwarding.stdout.readline())
        assert found is not None, "kubectl port-forward has not said where it listens"
        self.url = f"http://127.0.0.1:{found[1]}"

    def _stop_forwarding(self) -> None:
        if self._forwarding is not None:
            self._forwarding.terminate()
            self._forwarding.wait()
            assert self._forwarding.stdout is not None
            self._forwarding.stdout.close()

    def close(self) -> None:
        self._stop_forwarding()
        kubectl("delete", "userdeployments", "--all", "--namespace", self.namespace, "--ignore-not-found")
        kubectl("delete", "namespace", self.namespace, "--ignore-not-found")

    def client(self) -> BasilicaClient:
        return BasilicaClient(self.url, self.key)

    def cli(self, *arguments: str) -> str:
        return basilica(*arguments, BASILICA_API_URL=self.url, BASILICA_API_KEY=self.key)

    # ---- by hand

    def apply(self, name: str, *, command: list[str], world: dict[str, int], **spec: Any) -> None:
        distributed = {"worldSize": world, **spec.pop("distributed", {})}
        small = {"cpu": "50m", "memory": "128Mi"}
        body = {
            "apiVersion": "basilica.dev/v1alpha1",
            "kind": "UserDeployment",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"command": command, "resources": small, "distributed": distributed, **spec},
        }
        kubectl("apply", "-f", "-", given=json.dumps(body))

    def get(self, kind: str, name: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            kubectl("--namespace", self.namespace, "get", kind, *([name] if name else []), "-o", "json")
        )
        return found

    def until_phase(self, name: str, *phases: str) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.update(self.get("userdeployment", name).get("status") or {})
            return seen.get("phase") in phases

        until(there, f"{name} is {' or '.join(phases)}")
        return seen

    def delete_pods(self, instance: str, role: str) -> None:
        which = f"basilica.dev/instance={instance},basilica.dev/role={role}"
        kubectl("--namespace", self.namespace, "delete", "pod", "--selector", which, "--wait=false")

    def leftovers(self, instance: str) -> list[str]:
        """All that a run has on the cluster and is still there."""
        kinds = "pods,jobs,services,deployments,networkpolicies,serviceaccounts,secrets,configmaps"
        return [
            f"{found['kind']} {found['metadata']['name']}"
            for found in self.get(kinds)["items"]
            if found["metadata"]["name"].startswith(instance)
        ]


@contextmanager
def operators_killed(every: tuple[float, float]) -> Iterator[list[str]]:
    """Kill operators at random, the one that leads among them, while the block runs; whom is in the list.

    While nobody leads all are spared: who follows one that could not step down has to live for as long as its lease.
    """
    killed: list[str] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(random.uniform(*every)):
            select = ("--selector", "app.kubernetes.io/name=basilica-operator")
            names = kubectl("--namespace", CONTROL, "get", "pods", *select, "-o", "name").split()
            holder = ("get", "lease", "basilica-operator", "-o", "jsonpath={.spec.holderIdentity}")
            leader = kubectl("--namespace", CONTROL, *holder)
            if not any(leader.startswith(name.removeprefix("pod/")) for name in names):
                continue
            victim = random.choice(names)
            kubectl("--namespace", CONTROL, "delete", victim, "--grace-period=0", "--force", check=False)
            killed.append(victim)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def kubeconfig_is_there() -> bool:
    return bool(os.environ.get("KUBECONFIG")) or (Path.home() / ".kube" / "config").exists()
