"""The supervisor of a command beside a rank. Executed as `python -I -S attendant.py`, on a pipe of the server.

The pipe carries one message, a `CommandTask`, and then nothing: its end means that the server is gone, or that the
output is no longer read. Then, or when the command itself has ended, the attendant kills every process that the command
started, and exits as the command did. The command runs in the control groups of its rank and within its limits; among
their members it is the first that the kernel kills for memory.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

if __name__ == "__main__":  # executed as a file
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import standalone  # type: ignore[import-not-found]  # noqa: F401

    sys.path.pop()

from basilica.core.ends import CANNOT_EXECUTE, NOT_FOUND, OF_SIGNALS
from basilica.machine.cgroup_files import join_cgroup, remove_cgroup, write_file
from basilica.machine.proc import descendants
from basilica.runtimes.local.messages import read_message
from basilica.runtimes.local.process_control import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, prctl
from basilica.runtimes.local.signal_pipe import WOKEN_BY, send_to_group, signals_as_bytes
from basilica.runtimes.local.spawn import changed_signals, memory_rlimit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from basilica.runtimes.local.task import CgroupTask, CommandTask

CONTROL = 0
KILL_AGAIN_MS = 20
FIRST_TO_BE_KILLED = b"1000"


def main() -> int:
    task: CommandTask | None = read_message(CONTROL)
    if task is None:
        return 0
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"basilica-exec")
    changed = {*WOKEN_BY, *changed_signals()}
    wakeup = signals_as_bytes()
    made = [group for group in task["cgroups"] if _make(group["path"])]
    pid = _start(task, changed)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # copies in the attendant would keep the output open
        os.dup2(null, stream)
    status = _attend(pid, wakeup.fd)
    for group in reversed(made):
        remove_cgroup(group["path"])
    return OF_SIGNALS + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _make(path: str) -> bool:
    """Make the group. Return True if it did not exist, since its rank has ended."""
    try:
        os.mkdir(path)
    except OSError:
        return False
    return True


def _start(task: CommandTask, changed: set[int]) -> int:
    """Fork the command into groups and limits that the attendant enters for the fork, as supervisors start ranks."""
    groups = task["cgroups"]
    joined = [group for group in groups if join_cgroup(group["path"])]
    limited = any(group["limits_memory"] for group in joined)
    try:
        with memory_rlimit(None if limited else task["memory_limit"]):
            pid = os.fork()
            if pid == 0:
                _become_command(task, changed)
    finally:
        for group in joined:
            join_cgroup(group["home"])
    _set_limits(joined)
    return pid


def _set_limits(groups: list[CgroupTask]) -> None:
    """Limit groups that were made anew, as the rank's supervisor did. Groups that existed get the same values again."""
    for group in groups:
        for name, value in group["settings"]:
            write_file(os.path.join(group["path"], name), value.encode())


def _become_command(task: CommandTask, changed: set[int]) -> NoReturn:
    argv, directory = task["argv"], task["cwd"]
    code = CANNOT_EXECUTE
    try:
        signal.set_wakeup_fd(-1)
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        write_file("/proc/self/oom_score_adj", FIRST_TO_BE_KILLED)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, CONTROL)
        os.chdir(directory)
        os.execvpe(argv[0], argv, task["env"])
    except (OSError, ValueError) as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
        problem = error.strerror if isinstance(error, OSError) else str(error)
        os.write(2, f"cannot execute {argv[0]} in {directory}: {problem}\n".encode())
    finally:
        os._exit(code)


def _attend(command: int, wakeup: int) -> int:
    """Wait for the end of the command or the server, then of all processes; return the command's wait status."""
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(CONTROL, select.POLLIN)
    status: int | None = None
    alone = False
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == command:
                    status = ended[1]
        except ChildProcessError:
            return 0 if status is None else status
        ending = alone or status is not None
        if ending:
            _kill_all(command)
        for fd, _ in poll.poll(KILL_AGAIN_MS if ending else None):
            if not os.read(fd, 4096) and fd == CONTROL:
                alone = True
                poll.unregister(CONTROL)


def _kill_all(command: int) -> None:
    if sys.platform != "linux":
        send_to_group(command, signal.SIGKILL)
        return
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # the process has ended meanwhile
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
