"""Real torchrun agents of one run, started and stopped as the control plane would, and what their workers did.

Each worker adds a line to a ledger for every step that it took, with the sum that the all-reduce gave it.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from basilica.rendezvous.driver import Driver
from tests.support.zygote import Zygote

PATIENCE = 120.0
zygote = Zygote()  # it ends with this process

TRAIN = """
import datetime, os, sys, time
import torch, torch.distributed as dist

folder = sys.argv[1]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"{folder}/steps", "a", buffering=1) as ledger:
    while True:
        stop = float(os.path.exists(f"{folder}/stop"))
        numbers = torch.tensor([rank + 1.0, stop])
        try:
            dist.all_reduce(numbers)
        except RuntimeError:  # a peer left
            time.sleep(float(os.environ["LINGER"]))
            raise
        ledger.write(f"{time.time()} {world} {rank} {numbers[0].item():g} {restarts} {os.environ['AGENT']}\\n")
        if numbers[1].item():
            break
        time.sleep(0.05)
dist.destroy_process_group()
"""

# Defines `all_reduce`, `rank` and `world` as a worker has them, without the second of processor time that an import of
# torch takes: for stories of what the agents do. As with gloo, the loss of a peer is an error at the next sum.
ALL_REDUCE = """
import os, socket, sys, time

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    peers = [server.accept()[0].makefile("rw") for _ in range(world - 1)]
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=60)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    peers = [connection.makefile("rw")]

def send(peer, numbers):
    print(*numbers, file=peer, flush=True)

def receive(peer):
    line = peer.readline()
    if not line:
        raise RuntimeError("a peer left")
    return [float(number) for number in line.split()]

def all_reduce(numbers):
    if rank > 0:
        send(peers[0], numbers)
        return receive(peers[0])
    sums = [sum(column) for column in zip(numbers, *map(receive, peers))]
    for peer in peers:
        send(peer, sums)
    return sums
"""

TRAIN_WITHOUT_TORCH = (
    ALL_REDUCE
    + """
folder = sys.argv[1]
with open(f"{folder}/steps", "a", buffering=1) as ledger:
    while True:
        try:
            total, stop = all_reduce([rank + 1, float(os.path.exists(f"{folder}/stop"))])
        except (OSError, RuntimeError):
            time.sleep(float(os.environ["LINGER"]))
            raise
        restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
        ledger.write(f"{time.time()} {world} {rank} {total:g} {restarts} {os.environ['AGENT']}\\n")
        if stop:
            break
        time.sleep(0.05)
"""
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one worker of `agent`; `restarts` is how often torchrun says that it had to start it again."""

    time: float
    world: int
    rank: int
    sum: float
    restarts: int
    agent: int


class Agent:
    """One torchrun process with one worker, and its output. `rank` is its rank in the run, as its worker's steps have
    it.
    """

    def __init__(self, number: int, rank: int, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.number, self.log = number, folder / f"agent-{number}.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env}
        env |= {"AGENT": str(rank), "BASILICA_RANK": str(rank)}
        self.log.touch()
        self.process = zygote.start(command, self.log, env)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The agent and its workers at once, as a lost node would take them."""
        pids = [self.process.pid, *_children(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Ledger:
    """What workers wrote into `folder`, and waiting for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[Step]:
        ledger = self.folder / "steps"
        if not ledger.exists():
            return []
        lines = [line.split() for line in ledger.read_text().split("\n")[:-1]]
        return [Step(float(t), int(w), int(r), float(s), int(n), int(a)) for t, w, r, s, n, a in lines]

    def first_step(self, world: int, since: float) -> float:
        """When all ranks of a world of this size had taken a step, the first after the moment `since`."""
        found: dict[int, float] = {}

        def all_there() -> bool:
            for step in self.steps():
                if step.world == world and step.time > since:
                    found.setdefault(step.rank, step.time)
            return len(found) == world

        self.until(all_there, f"a step of a world of {world}")
        return max(found.values())

    def until(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {patience:g} s\n{self.said()}")
            time.sleep(0.02)

    def said(self) -> str:
        """What helps to understand why something did not happen."""
        return ""


class Fleet(Ledger):
    """The agents of the run `run_id`, which meet at `endpoint`.

    `linger`: how long a worker takes to fall over when it has lost a peer. An agent that is told in time to meet again
    does not count that as a failure. `launcher` is a module with its options that is used in place of torchrun, and
    `torchrun` a module that takes torchrun's options. Agents take turns with the `backends`.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        folder: Path,
        *,
        nodes: tuple[int, int],
        options: Sequence[str] = (),
        script: str = TRAIN,
        linger: float = 0.0,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] | None = None,
        torchrun: str = "torch.distributed.run",
        backends: Sequence[str] = ("basilica",),
    ) -> None:
        self._env = {"LINGER": str(linger), **(env or {})}
        super().__init__(folder)
        self.endpoint, self.run_id = endpoint, run_id
        (folder / "train.py").write_text(script)
        plain = [torchrun, f"--nnodes={nodes[0]}:{nodes[1]}", "--nproc-per-node=1"]
        plain += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}", "--max-restarts=10"]
        rest = [*options, str(folder / "train.py"), str(folder)]
        launched = [launcher] if launcher else [[*plain, f"--rdzv-backend={backend}"] for backend in backends]
        self._commands = [[*each, *rest] for each in launched]
        self.agents: list[Agent] = []

    def start(self, count: int = 1, rank: int | None = None) -> list[Agent]:
        """Start agents, with the ranks from `rank` on, else with those that follow all before."""
        for number in range(len(self.agents), len(self.agents) + count):
            command = self._commands[number % len(self._commands)]
            own = number if rank is None else rank + number - len(self.agents)
            self.agents.append(Agent(number, own, command, self.folder, self._env))
        return self.agents[-count:]

    def want(self, target: int) -> None:
        """What the control plane writes before it starts or stops anybody."""
        form = urllib.parse.urlencode({"value": json.dumps({"target": target})}).encode()
        url = f"http://{self.endpoint}/v2/keys/basilica/world"
        urllib.request.urlopen(urllib.request.Request(url, form, method="PUT"), timeout=10).close()

    def until_open(self) -> None:
        """Wait until a rendezvous that an agent has closed is open again."""
        url = f"http://{self.endpoint}/v2/keys/torchelastic/p2p/run_{self.run_id}/rdzv/active_version"

        def is_open() -> bool:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(json.loads(json.load(answer)["node"]["value"])["status"] != "closed")

        self.until(is_open, "rendezvous that is open again")

    def said(self) -> str:
        return "\n".join(agent.said() for agent in self.agents)

    def finish(self, agents: Sequence[Agent]) -> list[int]:
        """Let the training come to its end; how these agents exited."""
        (self.folder / "stop").touch()
        return [agent.process.wait(PATIENCE) for agent in agents]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()


@contextlib.contextmanager
def driven(endpoint: str, run_id: str) -> Iterator[None]:
    """A driver of the run for as long as the context lasts."""
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_drive(endpoint, run_id, running)))
    thread.start()
    loop, task = running.result()
    try:
        yield
        assert thread.is_alive(), "the driver ended"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


async def _drive(
    endpoint: str, run_id: str, running: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]"
) -> None:
    task = asyncio.create_task(Driver(endpoint, run_id).run())
    running.set_result((asyncio.get_running_loop(), task))
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [below for child in direct for below in (child, *_children(child))]
    return []
