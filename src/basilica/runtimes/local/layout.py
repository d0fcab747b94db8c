"""Where the local runtime keeps things.

<state_dir>/
├── wake                     a FIFO: supervisors write a line when a rank has started or ended
├── supervisor.log           what fork servers and supervisors had to complain about
├── rendezvous/              the keys of all open rendezvous, kept by a process of its own
├── removing/                runs that are just being removed
├── archives/<user>/         directories that users sent, by the SHA-256 of their bytes
└── runs/<instance>/
    ├── ports.json           ports of this run, picked once
    ├── checkpoints/         BASILICA_CHECKPOINT_DIR: survives restarts of ranks
    ├── results/             what ranks write beside their output, made by themselves:
    │   ├── <r>.json         BASILICA_RESULT_FILE of rank r
    │   ├── <r>.<a>.error    the Python exception that attempt a of it failed with, if it did
    │   └── <r>.source.py    the function that the published client shipped
    ├── reports/<r>.<a>.<p>  what process p of attempt a of rank r reported; made by itself, when it first does
    ├── workdir/             the unpacked archive of this run, if it has one
    ├── bench/               the bench probe: files as those of a rank, and result.json once it has one
    └── rank-<r>/            locked by the supervisor of the attempt that runs
        ├── <a>.record       who runs attempt a, since when, and how it ended: a line each, appended
        ├── <a>.log          its output, standard and error
        └── <a>.stop         somebody wants it to end

An attempt costs two files, no more: some file systems take a millisecond to make one.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One attempt of one rank of one run."""

    instance: str
    rank: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.instance} rank {self.rank} attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class Layout:
    root: Path

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def wake(self) -> Path:
        return self.root / "wake"

    @property
    def complaints(self) -> Path:
        return self.root / "supervisor.log"

    @property
    def rendezvous(self) -> Path:
        return self.root / "rendezvous"

    @property
    def removing(self) -> Path:
        return self.root / "removing"

    def run(self, instance: str) -> Path:
        return self.root / "runs" / instance

    def ports(self, instance: str) -> Path:
        return self.run(instance) / "ports.json"

    def checkpoints(self, instance: str) -> Path:
        return self.run(instance) / "checkpoints"

    @property
    def archives(self) -> Path:
        return self.root / "archives"

    def workdir(self, instance: str) -> Path:
        return self.run(instance) / "workdir"

    def results(self, instance: str) -> Path:
        return self.run(instance) / "results"

    def result(self, instance: str, rank: int) -> str:
        return f"{self.root}/runs/{instance}/results/{rank}.json"

    def reports(self, instance: str) -> Path:
        return self.run(instance) / "reports"

    def bench(self, instance: str) -> Path:
        return self.run(instance) / "bench"

    def rank(self, instance: str, rank: int) -> Path:
        return self.run(instance) / f"rank-{rank}"

    # These are asked for at every turn of every rank, where a Path each would be felt.

    def record(self, key: Key) -> str:
        return f"{self.root}/runs/{key.instance}/rank-{key.rank}/{key.attempt}.record"

    def log(self, key: Key) -> str:
        return f"{self.root}/runs/{key.instance}/rank-{key.rank}/{key.attempt}.log"

    def error(self, key: Key) -> str:
        return f"{self.root}/runs/{key.instance}/results/{key.rank}.{key.attempt}.error"

    def stop(self, key: Key) -> str:
        return f"{self.root}/runs/{key.instance}/rank-{key.rank}/{key.attempt}.stop"

    def report(self, key: Key) -> str:
        return f"{self.root}/runs/{key.instance}/reports/{key.rank}.{key.attempt}"

    def instances(self) -> list[str]:
        return _names(self.runs)

    def attempts(self, instance: str, rank: int) -> list[int]:
        """The attempts that somebody has, or had."""
        return sorted(_attempts(self.rank(instance, rank)))

    def keys(self, instance: str) -> Iterator[Key]:
        for name in _names(self.run(instance)):
            kind, _, number = name.partition("-")
            if kind == "rank" and number.isdigit():
                for attempt in self.attempts(instance, int(number)):
                    yield Key(instance, int(number), attempt)


def _attempts(rank: Path) -> Iterator[int]:
    for name in _names(rank):
        number, _, kind = name.partition(".")
        if kind == "record" and number.isdigit():
            yield int(number)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
