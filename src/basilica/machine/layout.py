"""The layout of the state directory of the local runtime.

<state_dir>/
├── wake                     a FIFO: supervisors write a line when a rank has started or ended
├── supervisor.log           errors of fork servers and supervisors
├── rendezvous/              the keys of all open rendezvous, kept by a process of its own
├── removing/                runs that are just being removed
├── archives/<user>/         directories that users sent, by the SHA-256 of their bytes
└── runs/<instance>/
    ├── ports.json           ports of this run, picked once
    ├── notice               BASILICA_NOTICE_FILE: the planned change that ranks are told of
    ├── checkpoints/         BASILICA_CHECKPOINT_DIR: survives restarts of ranks
    │   └── snapshots/       of these, ended/ has what was in memory when the run ended
    ├── snapshots/           BASILICA_SNAPSHOT_DIR where that cannot be in memory
    ├── results/             files that ranks write beside their output, made by themselves:
    │   ├── <r>.json         BASILICA_RESULT_FILE of rank r
    │   ├── <r>.<a>.error    the Python exception that attempt a of it failed with, if it did
    │   └── <r>.source.py    the function that the published client shipped
    ├── reports/<r>.<a>.<p>  the reports of process p of attempt a of rank r; made by itself, with the first report
    │                        beside it: .stack, its stacks on a signal; .notice, its answers to notices
    ├── commands             empty; there if a command ran beside a rank
    ├── workdir/             the unpacked archive of this run, if it has one
    ├── bench/               the bench probe: files as those of a rank, and result.json once it has one
    └── rank-<r>/            locked by the supervisor of the attempt that runs
        ├── <a>.record       the process of attempt a, its start and its end: a line each, appended
        ├── <a>.log          its output, standard and error
        └── <a>.stop         a request to end it

An attempt costs two files, no more: some file systems take a millisecond to make one.
"""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from basilica.machine import files
from basilica.machine.files import UnusableFile

DIGITS_MAX = 9


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One attempt of one rank of one run."""

    instance: str
    rank: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.instance} rank {self.rank} attempt {self.attempt}"


def number_of(text: str) -> int | None:
    """Parse a number as this program writes it; None for anything else, such as other digits or thousands of them."""
    return int(text) if len(text) <= DIGITS_MAX and text.isascii() and text.isdigit() else None


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below `root`, which is canonical, as `machine.files` requires: no path below it leads over a link."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(os.path.realpath(self.root)))

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

    def snapshots(self, instance: str) -> Path:
        """The snapshot directory of a run whose snapshots cannot be in memory."""
        return self.run(instance) / "snapshots"

    def notice(self, instance: str) -> str:
        return f"{self.root}/runs/{instance}/notice"

    def commands(self, instance: str) -> Path:
        """The file exists if commands ran beside ranks of the run."""
        return self.run(instance) / "commands"

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

    # These are called in every turn for every rank: strings, since a Path each would be too slow.

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
        """Return all runs. Names with a dot are files that were put aside: no run has one."""
        return _names(self.runs, lambda name: "." not in name, limit=None)

    def attempts(self, instance: str, rank: int) -> list[int]:
        """Return the attempts that run or have run."""
        return sorted(_attempts(self.rank(instance, rank)))

    def keys(self, instance: str) -> Iterator[Key]:
        for name in _names(self.run(instance), lambda name: name.startswith("rank-")):
            kind, _, number = name.partition("-")
            rank = number_of(number) if kind == "rank" else None
            if rank is not None:
                for attempt in self.attempts(instance, rank):
                    yield Key(instance, rank, attempt)


def _attempts(rank: Path) -> Iterator[int]:
    for name in _names(rank, lambda name: name.endswith(".record")):
        number, _, kind = name.partition(".")
        attempt = number_of(number) if kind == "record" else None
        if attempt is not None:
            yield attempt


def _names(directory: Path, keep: Callable[[str], bool], limit: int | None = files.ENTRIES_MAX) -> list[str]:
    """Return the names that `keep` accepts; none if there is no such directory. Other files of ranks do not count."""
    try:
        return files.names(str(directory), limit, keep)
    except FileNotFoundError:
        return []
    except UnusableFile as error:
        if error.errno == errno.ENOTDIR:
            return []
        raise
