"""Both ends started from one machine: `python -m basilica.bench.pair --out FILE --ends JSON`.

`--ends` is a list of two `{"node": …, "address": …, "enter": […]}`: `enter` is what stands before a command so that it
runs there. The report is in the file, whole, before this exits 0. Otherwise it exits 1 and its last line says why.
It runs beside the ranks, so it steps back behind them: low priority, one thread for each end, no GPU.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from basilica.bench.probe import BUDGET_S, TOKEN
from basilica.bench.report import problem_in
from basilica.core.ends import signal_name

# A tenth of what a busy rank gets. Lower, and on a busy machine the probe would hardly come as far as measuring.
NICENESS = 10
# Loading torch on a machine whose cores are all busy takes a minute.
DEADLINE_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m basilica.bench.pair", description=__doc__)
    parser.add_argument("--ends", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S)
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    options = parser.parse_args(arguments)
    step_back()
    problem = Pair(options).run()
    if problem is None:
        os.replace(draft(options.out, 0), options.out)
        return 0
    print(problem, file=sys.stderr, flush=True)
    return 1


def step_back() -> None:
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError):  # where sessions share the machine among themselves, the priority within ours says nothing
        Path("/proc/self/autogroup").write_text(str(NICENESS))


class Pair:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.env = {**os.environ, TOKEN: secrets.token_hex(16), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.probes: list[subprocess.Popen[bytes]] = []

    def run(self) -> str | None:
        """Why there is no report; None if there is one."""
        first, second = self.options.ends
        told, telling = os.pipe()
        try:
            with os.fdopen(told) as ports:
                self.start(first, "--listen", f"{first['address']}:0", "--port-fd", str(telling), keep=[telling])
                os.close(telling)
                port = ports.readline().strip()
            if port:  # else it has ended
                self.start(second, "--peer", f"{first['address']}:{port}")
        except OSError as error:
            for probe in self.probes:
                probe.kill()
            return f"cannot start a probe: {error.strerror or error}"
        return self.wait()

    def start(self, end: Mapping[str, Any], *where: str, keep: Sequence[int] = ()) -> None:
        rank, options = len(self.probes), self.options
        command = [sys.executable, "-P", "-m", "basilica.bench.probe", "--rank", str(rank), *where]
        command += ["--node", end["node"], "--method", options.method, "--out", str(draft(options.out, rank))]
        command += ["--deadline", str(options.deadline), "--budget", str(options.budget)]
        self.probes.append(subprocess.Popen([*end.get("enter", ()), *command], env=self.env, pass_fds=keep))

    def wait(self) -> str | None:
        """The reason of the one that failed first: the other only tells that it was left alone."""
        ranks = {probe.pid: rank for rank, probe in enumerate(self.probes)}
        problem: str | None = None
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            code = self.probes[rank].returncode = os.waitstatus_to_exitcode(status)
            if code != 0 and problem is None:
                problem = why(rank, code, draft(self.options.out, rank))
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        draft(self.options.out, 1).unlink(missing_ok=True)
        return problem


def why(rank: int, code: int, report: Path) -> str:
    if code < 0:
        return f"probe {rank} was ended by {signal_name(-code)}"
    try:
        said = problem_in(report.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        said = ""
    return said or f"probe {rank} exited with code {code}"


def draft(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.name}.{rank}")


if __name__ == "__main__":
    sys.exit(main())
