"""A command beside a rank in its container: `python -m basilica.entrypoint --beside -- COMMAND [ARGUMENT...]`.

It runs with the environment and the directory of the rank's newest attempt, writes `COMMAND_RUNS` first, and ends as
the command did. Kubernetes leaves a command alone whose client has gone, and only closes its standard input. So that
is watched here: at its end the command is killed, with all that it started. The command itself reads from /dev/null.
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
    threading.Thread(target=_end_when_nobody_listens, args=(process, mark), daemon=True).start()
    code = process.wait()
    _end_all(mark)  # what it left behind would keep its output open
    return exit_code_of(code)


def _end_when_nobody_listens(process: subprocess.Popen[bytes], mark: bytes) -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    if process.poll() is None:
        with suppress(OSError):  # gone meanwhile
            os.killpg(process.pid, signal.SIGKILL)
    _end_all(mark)


def _end_all(mark: bytes) -> None:
    while found := with_environment({mark}):
        kill(found)
        time.sleep(KILL_AGAIN_S)


# ---- what the rank was given -----------------------------------------------------------------------------------------


def tell(environment: Mapping[str, str]) -> None:
    """Leave word of what the rank is started with: its directory, and what differs from the container's environment.

    The rest, in which there may be secrets, is not written down: every process of the container is given it.
    """
    with suppress(OSError):  # commands then have less; the rank itself has all
        given = _given_to_us()
        added = {name: value for name, value in environment.items() if given.get(name) != value}
        left_out = [name for name in given if name not in environment]
        path = _path(given)
        written = path.with_suffix(f".{os.getpid()}")
        told = {"environment": added, "without": left_out, "directory": os.getcwd()}
        written.write_text(json.dumps(told), encoding="utf-8")
        written.replace(path)


def forget() -> None:
    with suppress(OSError):
        _path(_given_to_us()).unlink()


def _given_to_us() -> dict[str, str]:
    """The environment that this process was started with, whatever it has made of it since."""
    pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (pair.partition(b"=") for pair in pairs) if name
    }


def rank_of_this_container(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The environment and the directory of its newest attempt; before the first, as far as they are known."""
    rank, world = environment.get(env.RANK, "0"), environment.get(env.WORLD_TARGET, "1")
    found = {**environment, "RANK": rank, "WORLD_SIZE": world}
    try:
        told = json.loads(_path(environment).read_text(encoding="utf-8"))
        left_out = set(told["without"])
        kept = {name: value for name, value in found.items() if name not in left_out}
        return {**kept, **told["environment"]}, told["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return found, os.getcwd()


def _path(environment: Mapping[str, str]) -> Path:
    """Where a container's processes find each other; pods may share a directory for what is temporary."""
    folder = environment.get("TMPDIR") or "/tmp"
    return Path(folder, f"basilica-rank-{environment.get(env.POD_UID, 'here')}.json")
