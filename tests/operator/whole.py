"""A whole installation: a cluster whose pods are processes; an operator and an API server as processes of their own."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from basilica.kube.manifests.crd import definition
from basilica.server.auth import key_record, new_key
from basilica.wiring.kubernetes import ClusterOptions, open_cluster_keys
from basilica_testkube import KubeServer, NodeSpec

ROOT = Path(__file__).parents[2]
START_SECONDS = 30
SHIPPED_SOURCE = "/tmp/__basilica_source.py"  # where the published client's ranks put what they run


class Installation:
    """What the stories of the local server need of one: a URL and keys."""

    def __init__(
        self,
        directory: Path,
        *,
        lease_seconds: float = 15.0,
        nodes: Sequence[NodeSpec] = (NodeSpec("node-0"),),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env`: variables for every container."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._lease_seconds = directory, lease_seconds
        self.kube = KubeServer(nodes=nodes, env=env, own_files=[SHIPPED_SOURCE]).start()
        self.kube.create(definition())
        self.kubeconfig = self.kube.kubeconfig(directory / "kubeconfig")
        self._operators = self._servers = 0
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self.key = self.key_of("local")
            self._start_both("0")
        except BaseException:
            self.close()
            raise

    def key_of(self, user: str) -> str:
        """An API key, as `basilica keys create` makes it."""

        async def make() -> str:
            async with open_cluster_keys(ClusterOptions(kubeconfig=str(self.kubeconfig), namespace="default")) as keys:
                key = new_key()
                await keys.add_key(key_record(key, user, time.time()))
                return key

        return asyncio.run(make())

    def basilica(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "basilica.cli.main", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start_operator(self) -> tuple[subprocess.Popen[str], str]:
        """Another operator, and where it answers."""
        self._operators += 1
        arguments = ["-m", "tests.operator.process", str(self.kubeconfig), str(self._lease_seconds)]
        return self._start(arguments, f"operator-{self._operators}.log")

    def start_server(self, port: str = "0") -> tuple[subprocess.Popen[str], str]:
        """Another API server, and its URL."""
        self._servers += 1
        arguments = ["-m", "basilica.cli.main", "serve", "--store", "kubernetes", "--port", port, *self.cluster]
        process, said = self._start(arguments, f"server-{self._servers}.log")
        return process, said.rpartition(" ")[2]

    def kill(self) -> None:
        """The whole control plane, as by the kernel: no chance to tidy up."""
        for process in (self.operator, self.server):
            process.kill()
            process.wait(START_SECONDS)

    def start_again(self) -> None:
        """Where it was."""
        self._start_both(self.url.rpartition(":")[2])

    def _start_both(self, port: str) -> None:
        """At the same time: most of it is the start of an interpreter."""
        with ThreadPoolExecutor() as pool:
            operator, server = pool.submit(self.start_operator), pool.submit(self.start_server, port)
            self.operator, self.health = operator.result()
            self.server, self.url = server.result()

    def _start(self, arguments: list[str], log: str) -> tuple[subprocess.Popen[str], str]:
        with (self._directory / log).open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._processes.append(process)
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        assert said, (self._directory / log).read_text()
        return process, said

    @property
    def cluster(self) -> list[str]:
        """Options that name it."""
        return ["--kubeconfig", str(self.kubeconfig), "--namespace", "default"]

    def close(self) -> None:
        """End every process in order; nothing of them may be left."""
        try:
            for process in reversed(self._processes):
                if process.poll() is None:
                    process.terminate()
                process.wait(START_SECONDS)
                if process.stdout is not None:
                    process.stdout.close()
        finally:
            self.kube.close()
