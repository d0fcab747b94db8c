"""The first process of a rank in our images: `python -m basilica.entrypoint -- COMMAND [ARGUMENT...]`.

The entrypoint waits at the mesh gate and then stays as init: it starts the rank, forwards signals to it, reaps its
orphans, restarts it in place while there are restarts left, records each exit, and ends as the rank did (128+n for
signal n). A rank that is process 1 itself would ignore SIGTERM, and could turn a crash into exit 0. With `--beside`
before the `--` the entrypoint runs a command beside the rank instead, see `basilica.rank.exec`.

    BASILICA_MAX_RESTARTS   how often the rank may start again after a failure (default 0)
    BASILICA_MESH_TIMEOUT   seconds to wait at the gate at most (default 60)
    BASILICA_EXIT_FILE      the file of the latest exits, newest last, as JSON
    BASILICA_DRIVEN         1: run the attempts that the run's keyspace orders instead, see `basilica.rank.agent`
    BASILICA_HOST_ADDRESS   this host's address for training: its reachability of other hosts is then published
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from basilica import mesh
from basilica.core import environment as env
from basilica.core import policy
from basilica.core.ends import CANNOT_EXECUTE, NOT_FOUND, OF_SIGNALS, exit_code_of, killer_of
from basilica.machine.clocks import steady_now
from basilica.rank.log import log
from basilica.rendezvous.names import WORLD

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGTERM, signal.SIGINT)
HANDLED = {*FORWARDED, signal.SIGCHLD}
BAD_USAGE = 2
EXITS_KEPT = 8  # a container's termination message holds 4096 bytes
ASK_WITHIN_S = 5.0
PR_SET_CHILD_SUBREAPER = 36
PACKAGE_ROOT = os.path.dirname(  # of the import path that has `basilica`
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)


class Rank:
    """The rank's process, in a group of its own. `output`: its stdout and stderr, if not those of this process."""

    def __init__(self, command: list[str], environment: Mapping[str, str], output: int | None = None) -> None:
        self.code: int | None = None  # as subprocess has it: -n for signal n
        self.started_at = steady_now()
        ignored = {number for number in HANDLED if signal.getsignal(number) is signal.SIG_IGN}
        actions = [] if output is None else [(os.POSIX_SPAWN_DUP2, output, fd) for fd in (1, 2)]
        self.pid = os.posix_spawnp(
            command[0],
            command,
            environment,
            file_actions=actions,
            setpgroup=0,
            setsigmask=(),
            setsigdef=HANDLED - ignored,
        )

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank with its whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Reap dead children. Once the rank is among them, kill the rest of its group and return its exit code."""
        for pid, status in reap_all():
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.kill()
        return self.code


def reap_all() -> list[tuple[int, int]]:
    """Reap dead children; return their pids and wait statuses."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (died := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(died)
    return found


class Init:
    """The init process of one rank, which it restarts."""

    def __init__(self, command: list[str], max_restarts: int, exit_file: str | None) -> None:
        self._command, self._max_restarts, self._exit_file = command, max_restarts, exit_file
        self._exits: list[dict[str, Any]] = []
        self._ending: int | None = None  # the signal to end that has arrived

    def run(self) -> int:
        """Run the rank and its restarts; return the exit code of the last attempt."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        restarts = 0
        while True:
            code = self._attempt()
            if code == 0 or self._ending is not None or not policy.may_restart(restarts, self._max_restarts):
                return code
            restarts += 1
            delay = policy.restart_delay(restarts)
            log(f"the rank starts again in {delay:g} s: restart {restarts} of {self._max_restarts}")
            if self._pause(delay):
                return code

    def _attempt(self) -> int:
        try:
            rank = Rank(self._command, {**os.environ, **live_world(os.environ)})
        except OSError as error:
            log(f"cannot execute {self._command[0]}: {error.strerror}")
            missing = isinstance(error, FileNotFoundError)
            self._max_restarts = 0  # the program would be missing the next time, too
            return NOT_FOUND if missing else CANNOT_EXECUTE
        while True:
            number = signal.sigwait(HANDLED)
            if number == signal.SIGCHLD:
                code = rank.reap()
                if code is not None:
                    return self._record(rank, code)
            else:
                self._ending = number if number in ENDING else self._ending
                rank.signal(number)

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; True if a signal to end arrives meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            arrived = signal.sigtimedwait(HANDLED, left)
            if arrived is not None and arrived.si_signo in ENDING:
                return True
        return False

    def _record(self, rank: Rank, code: int) -> int:
        exit_code, name = exit_code_of(code), killer_of(code)
        self._exits.append({
            "exitCode": exit_code,
            "signal": name,
            "startedAt": rank.started_at,
            "finishedAt": steady_now(),
        })  # fmt: skip
        if self._exit_file:
            with contextlib.suppress(OSError), open(self._exit_file, "w", encoding="utf-8") as file:
                json.dump(self._exits[-EXITS_KEPT:], file)
        return exit_code


def live_world(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the world's size as the rendezvous has it now: those of this process may be old."""
    endpoint = environment.get(env.RENDEZVOUS_ENDPOINT)
    if not endpoint:
        return {}
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{endpoint}/v2/keys{WORLD}", timeout=ASK_WITHIN_S) as answer:
            size = int(json.loads(json.load(answer)["node"]["value"])["target"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"WORLD_SIZE": str(size), env.WORLD_TARGET: str(size)}


def main(arguments: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] == ["--beside"]:
        from basilica.rank import exec as rank_exec  # noqa: PLC0415 - not needed to run a rank

        return rank_exec.main(command[1:])
    if command[:1] == ["--"]:
        command = command[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if command else sys.stderr)
        return 0 if command else BAD_USAGE
    signal.signal(signal.SIGTERM, _end_at_once)  # process 1 would ignore it
    signal.signal(signal.SIGINT, _end_at_once)
    _adopt_orphans()
    if os.environ.get(env.DRIVEN) == "1":
        from basilica.rank import agent  # noqa: PLC0415 - not needed without a control plane

        return agent.main(command)
    _start_reachability()
    mesh.main(["--timeout", os.environ.get(env.MESH_TIMEOUT, "60")])
    return Init(command, _number(env.MAX_RESTARTS), os.environ.get(env.EXIT_FILE)).run()


def _start_reachability() -> None:
    address = os.environ.get(env.HOST_ADDRESS)
    if address and os.environ.get("NODE_NAME") and os.environ.get(env.RENDEZVOUS_ENDPOINT):
        # The process ends with the container, or with the run's rendezvous.
        command = [sys.executable, "-m", "basilica.rank.reachability", "--address", address]
        where = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        os.posix_spawn(sys.executable, command, {**os.environ, "PYTHONPATH": where})


def _end_at_once(number: int, _: FrameType | None) -> None:
    raise SystemExit(OF_SIGNALS + number)


def _adopt_orphans() -> None:
    """Make orphans of the rank children of this process, as they would be of process 1."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _number(name: str) -> int:
    try:
        return max(0, int(os.environ.get(name, "0")))
    except ValueError:
        log(f"{name} is no number: {os.environ[name]!r}; 0 is taken")
        return 0
