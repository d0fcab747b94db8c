"""A command beside a rank in its container: `python -m basilica.entrypoint --beside -- COMMAND [ARGUMENT...]`.

The command has the environment and the directory of the rank's newest attempt. This process writes `COMMAND_RUNS`
first, and exits as the command did. When a client goes away, Kubernetes does not stop the command, it only closes the
standard input. So this process watches it: at its end the command is killed, with all that it started. The command
itself reads from /dev/null.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from basilica.core import environment as env
from basilica.core.ends import CANNOT_EXECUTE, NOT_FOUND, exit_code_of
from basilica.machine.strays import kill, with_environment
from basilica.runtimes.rules import COMMAND_RUNS

BAD_USAGE = 2
KILL_AGAIN_S = 0.02


def main(arguments: Sequence[str]) -> int:
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not command:
        print(__doc__, file=sys.stderr)
        return BAD_USAGE
    os.write(sys.stdout.fileno(), COMMAND_RUNS)
    environment, directory = rank_of_this_container(os.environ)
    token = secrets.token_hex(16)
    try:
        process = subprocess.Popen(
            command,
            env={**environment, env.COMMAND_MARK: token},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"cannot execute {command[0]} in {directory}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    mark = f"{env.COMMAND_MARK}={token}".encode()
    threading.Thread(target=_kill_at_end_of_input, args=(process, mark), daemon=True).start()
    code = process.wait()
    _kill_all(mark)  # processes that it left behind would keep its output open
    return exit_code_of(code)


def _kill_at_end_of_input(process: subprocess.Popen[bytes], mark: bytes) -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    if process.poll() is None:
        with suppress(OSError):  # gone meanwhile
            os.killpg(process.pid, signal.SIGKILL)
    _kill_all(mark)


def _kill_all(mark: bytes) -> None:
    while found := with_environment({mark}):
        kill(found)
        time.sleep(KILL_AGAIN_S)


# ---- the environment of the rank -------------------------------------------------------------------------------------


def record_environment(environment: Mapping[str, str]) -> None:
    """Record the rank's directory, and the variables that differ from the container's environment, in a file.

    The other variables, which may be secrets, are not written: every process of the container has them.
    """
    with suppress(OSError):  # commands then have fewer variables; the rank itself has all
        given = _container_environment()
        added = {name: value for name, value in environment.items() if given.get(name) != value}
        left_out = [name for name in given if name not in environment]
        path = _path(given)
        written = path.with_suffix(f".{os.getpid()}")
        recorded = {"environment": added, "without": left_out, "directory": os.getcwd()}
        written.write_text(json.dumps(recorded), encoding="utf-8")
        written.replace(path)


def remove_recorded() -> None:
    with suppress(OSError):
        _path(_container_environment()).unlink()


def _container_environment() -> dict[str, str]:
    """Return the environment that this process was started with, without its own changes since."""
    pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (pair.partition(b"=") for pair in pairs) if name
    }


def rank_of_this_container(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the environment and the directory of the newest attempt; before the first, as far as they are known."""
    rank, world = environment.get(env.RANK, "0"), environment.get(env.WORLD_TARGET, "1")
    found = {**environment, "RANK": rank, "WORLD_SIZE": world}
    try:
        recorded = json.loads(_path(environment).read_text(encoding="utf-8"))
        left_out = set(recorded["without"])
        kept = {name: value for name, value in found.items() if name not in left_out}
        return {**kept, **recorded["environment"]}, recorded["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return found, os.getcwd()


def _path(environment: Mapping[str, str]) -> Path:
    """Return the path of the record, with the pod in its name: pods may share a temporary directory."""
    folder = environment.get("TMPDIR") or "/tmp"
    return Path(folder, f"basilica-rank-{environment.get(env.POD_UID, 'here')}.json")
