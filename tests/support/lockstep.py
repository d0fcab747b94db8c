"""A training program whose processes keep a diary of their own and obey orders, and the reader of both.

Each process appends what it does, and when, to a file of its own: tests compare that with what the control plane says.
With torchrun the workers take every step together, over plain sockets: no worker has to import torch.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.agents import ALL_REDUCE

STEP_SECONDS = 0.05
CHECKPOINT_STEPS = 20

PROGRAM = (
    """
import json, os, signal, sys, time

folder = os.environ["LOCKSTEP_FOLDER"]
together = "TORCHELASTIC_RUN_ID" in os.environ
PLACE = os.environ["BASILICA_RANK"] + "." + (os.environ["LOCAL_RANK"] if together else "0")
diary = open(f"{folder}/diary/{PLACE}.{os.environ['BASILICA_ATTEMPT']}.{os.getpid()}", "ab", buffering=0)

def note(what, mono=None, **facts):
    mono = time.monotonic() if mono is None else mono
    diary.write(json.dumps({"what": what, "mono": mono, "at": time.time(), **facts}).encode() + b"\\n")

def started(pid):
    ticks = int(open(f"/proc/{pid}/stat", "rb").read().rpartition(b")")[2].split()[19])
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - ago

def leave(number, _):
    note("stopped")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

signal.signal(signal.SIGTERM, leave)
note("start", started(os.getpid()), pid=os.getpid(), parent=os.getppid(), parent_start=started(os.getppid()))
"""
    + "if together:\n"
    + "".join(f"    {line}\n" for line in ALL_REDUCE.splitlines())
    + """
else:
    rank, world = int(os.environ["BASILICA_RANK"]), 1
    def all_reduce(numbers):
        return numbers

from basilica import report

def together_or_not_at_all(numbers):
    try:
        return all_reduce(numbers)
    except (OSError, RuntimeError, ValueError):
        note("lost peer")
        raise ConnectionResetError("a peer left") from None

def number_in(name):
    try:
        return int(open(f"{folder}/{name}").read() or 0)
    except OSError:
        return 0

def remember(name, number):
    with open(f"{folder}/{name}.{os.getpid()}", "w") as file:
        file.write(str(number))
    os.replace(f"{folder}/{name}.{os.getpid()}", f"{folder}/{name}")

def order():
    path = f"{folder}/orders/{PLACE}"
    if not os.path.exists(path):
        return {}
    found = json.load(open(path))
    os.unlink(path)
    return found

def obey(given):
    note("order", torch_rank=rank, **given)
    if given["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if given["do"] == "raise":
        raise RuntimeError(f"boom {given['n']}")
    if given["do"] == "exit":
        sys.exit(given["code"])
    if given["do"] == "eat":
        eaten = []
        while True:
            eaten.append(b"x" * (8 << 20) + bytes([len(eaten) % 256]))
    if given["do"] == "hang":
        while not os.path.exists(f"{folder}/go-on.{given['n']}"):
            time.sleep(0.02)
        note("goes on")

first = rank == 0
step = int(together_or_not_at_all([number_in("checkpoint") if first or not together else 0])[0])
reached = number_in(f"reached.{PLACE}")
if not reached and int(os.environ["BASILICA_RANK"]) >= int(os.environ["LOCKSTEP_FIRST"]):
    # A newcomer repeats what any other has done.
    others = [name for name in os.listdir(folder) if name.startswith("reached.") and name.count(".") == 2]
    reached = max(map(number_in, others), default=0)
while True:
    given = order()
    if given and given["do"] != "hang":
        obey(given)
    (stop,) = together_or_not_at_all([float(os.path.exists(f"{folder}/stop"))])
    if given and given["do"] == "hang":
        obey(given)
    step += 1
    note("step", step=step, new=step > reached, torch_rank=rank, world=world)
    report(step=step)
    if step > reached:
        reached = step
        remember(f"reached.{PLACE}", step)
    if first and step % CHECKPOINT_STEPS == 0:
        remember("checkpoint", step)
    if stop:
        break
    time.sleep(STEP_SECONDS)
note("end")
"""
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a diary. `at` is by the wall clock and `mono` by the monotonic one, which the entry is about."""

    rank: int
    worker: int
    attempt: int
    pid: int
    what: str
    mono: float
    at: float
    facts: dict[str, Any]

    @property
    def place(self) -> tuple[int, int]:
        return self.rank, self.worker


@dataclass(slots=True)
class Diaries:
    """The folder of one run of the program: its diaries, and the orders to its processes."""

    folder: Path
    ranks: int = 2  # with which the run begins
    entries: list[Entry] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("diary", "orders"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        constants = f"STEP_SECONDS, CHECKPOINT_STEPS = {STEP_SECONDS}, {CHECKPOINT_STEPS}\n"
        self.script.write_text(constants + PROGRAM)

    @property
    def script(self) -> Path:
        return self.folder / "train.py"

    @property
    def environment(self) -> dict[str, str]:
        return {"LOCKSTEP_FOLDER": str(self.folder), "LOCKSTEP_FIRST": str(self.ranks), "OMP_NUM_THREADS": "1"}

    def order(self, rank: int, worker: int, do: str, n: int, **more: object) -> None:
        path = self.folder / "orders" / f"{rank}.{worker}"
        ready = self.folder / f"order.{n}"
        ready.write_text(json.dumps({"do": do, "n": n, **more}))
        ready.rename(path)

    def let_go_on(self, n: int) -> None:
        (self.folder / f"go-on.{n}").touch()

    def stop(self) -> None:
        (self.folder / "stop").touch()

    def refresh(self) -> list[Entry]:
        """Read what was written since; return all entries."""
        for path in sorted((self.folder / "diary").iterdir()):
            seen = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(seen)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path.name] = seen + len(whole)
            rank, worker, attempt, pid = map(int, path.name.split("."))
            for line in whole.splitlines():
                facts = json.loads(line)
                what, mono, at = facts.pop("what"), facts.pop("mono"), facts.pop("at")
                self.entries.append(Entry(rank, worker, attempt, pid, what, mono, at, facts))
        return self.entries

    def find(self, what: str, since: float = 0.0, **facts: object) -> list[Entry]:
        """Return the entries of that kind and with those facts from after a monotonic time."""
        wanted = facts.items()
        found = [entry for entry in self.refresh() if entry.what == what and entry.mono > since]
        return [entry for entry in found if all(entry.facts.get(name) == value for name, value in wanted)]

    def all_step(self, since: float, places: int, world: int | None = None) -> float | None:
        """Return the monotonic time at which the last of so many processes took its first step after `since`."""
        firsts: dict[tuple[int, int], float] = {}
        for entry in self.find("step", since):
            if world is None or entry.facts["world"] == world:
                firsts.setdefault(entry.place, entry.mono)
        return max(firsts.values()) if len(firsts) >= places else None


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Return the first true answer of the condition, which nobody notifies of."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
    return found
