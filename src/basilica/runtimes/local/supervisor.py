"""The fork server and its supervisors. Executed as `python -I -S supervisor.py`.

The fork server reads requests (8 bytes of length, then JSON) from its stdin, forks one supervisor per rank and answers
with their pids. At end of file it exits; the supervisors, each in a session of its own, live on.

A supervisor locks its rank, claims the attempt, executes the rank and stays until the rank and every process that it
started are gone. Then it writes the exit record. It works without the control plane, which may be down meanwhile.

Each import here costs memory per rank and time per start, hence no `typing`, `socket`, `subprocess` or `asyncio`.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import signal
import stat
import sys
import time
from contextlib import suppress

if "." not in __name__:  # executed as a file, or beside one
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import standalone  # type: ignore[import-not-found]  # noqa: F401

    sys.path.pop()

from basilica.core.ends import (
    CANNOT_EXECUTE,
    NOT_FOUND,
    OF_SIGNALS,
    SHORTAGES,
    START_AGAIN_AFTER_SECONDS,
    START_AGAIN_AT_MOST_SECONDS,
    reason_of,
    signal_name,
)
from basilica.machine.cgroup_files import (
    join_cgroup,
    kill_cgroup,
    kill_frozen,
    make_cgroup,
    read_memory_kills,
    remove_cgroup,
    write_file,
)
from basilica.machine.proc import SAFELY, boot, descendants, read_file, start_time
from basilica.runtimes.local.log_limit import LogLimit
from basilica.runtimes.local.messages import read_message, write_message
from basilica.runtimes.local.process_control import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, prctl
from basilica.runtimes.local.record_files import (
    append,
    claimed_attempts,
    create_log,
    create_record,
    in_place,
    make_directory,
    put_aside,
)
from basilica.runtimes.local.signal_pipe import NEVER, WOKEN_BY, send_to_group, signals_as_bytes
from basilica.runtimes.local.spawn import candidates, changed_signals, enter, exec_problem, memory_rlimit, real_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from basilica.runtimes.local.task import CgroupTask, RankTask, StartRequest

NAME = b"basilica-rank"  # of a supervisor, as the system shows it: 15 bytes at most

LOGS_KEPT = 16
KILL_AGAIN_AFTER_S = 0.02
KILL_AGAIN_AT_MOST_S = 1.0
TRY_TO_WRITE_AGAIN_S = 1.0
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
COUNTER = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


# ------------------------------------------------------------------------------------------------- the fork server


class ForkServer:
    """Forks supervisors on request until the control plane is gone, and computes once the data that they share."""

    def __init__(self, control: int) -> None:
        self.control = control
        self.boot = boot()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for supervisors: the kernel reaps them
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        self.changed_signals = {*WOKEN_BY, *changed_signals()}

    def serve(self) -> None:
        os.chdir("/")
        gc.disable()  # a collection writes to every object: pages that parent and children share would be copied
        gc.freeze()
        while (request := read_message(self.control)) is not None:
            write_message(self.control, self.start(request))

    def start(self, request: StartRequest) -> dict[str, Any]:
        pids: list[int] = []
        for task in request["ranks"]:
            try:
                pid = os.fork()
            except OSError as error:
                return {"pids": pids, "error": f"cannot fork: {error.strerror}"}
            if pid == 0:
                self.become_supervisor(request, task)
            pids.append(pid)
        return {"pids": pids, "error": None}

    def become_supervisor(self, request: StartRequest, task: RankTask) -> NoReturn:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, self.control)  # our copy would hide the fork server's death from the control plane
            os.close(null)
            os.setsid()
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            prctl(PR_SET_NAME, NAME)
            Supervisor(self, request, task).supervise()
            code = 0
        except BaseException:  # noqa: BLE001  after any failure, a child must not continue the server's loop
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(code)


# --------------------------------------------------------------------------------------------------- a supervisor


class Supervisor:
    """Supervises one attempt of one rank, from the claim to the exit record."""

    def __init__(self, server: ForkServer, request: StartRequest, task: RankTask) -> None:
        self.server = server
        self.request = request
        self.task = task
        self.directory = task["directory"]
        self.rank_pid = 0
        self.finished_at = 0.0
        self.asked_to_stop = False
        self.kill_at = NEVER
        self.kill_pause = KILL_AGAIN_AFTER_S
        self.log: LogLimit | None = None
        self.user = request.get("user")

    def file(self, kind: str) -> str:
        return f"{self.directory}/{self.task['attempt']}.{kind}"

    def now(self) -> float:
        """Return the time by the requesting server's clock, which does not jump when the wall clock is set."""
        return self.request["clock_zero"] + time.clock_gettime(COUNTER)

    def supervise(self) -> None:
        self.wakeup = signals_as_bytes()
        try:
            claimed = self.claim()
        except OSError as error:
            self.tell(f"failed {error.strerror}")
            return
        if not claimed:
            return
        self.read_stop()
        if self.asked_to_stop:
            self.finish(exit_code=None)
            return
        problem = self.execute()
        if problem is not None:
            code, sentence = problem
            self.finished_at = self.now()
            self.finish(exit_code=code, start_error=sentence)
            return
        rank = {"pid": self.rank_pid, "start": start_time(self.rank_pid), "started_at": self.now()}
        with suppress(OSError):  # a failing disk is no reason to abandon the rank
            append(self.record, "running", rank)
        self.tell("started")
        status = self.wait()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            self.finish(exit_code=OF_SIGNALS + number, killer=signal_name(number))
        else:
            self.finish(exit_code=os.WEXITSTATUS(status))

    def claim(self) -> bool:
        """Claim this attempt before executing anything. False: another process has it, or it must never run.

        The supervisor keeps the rank's lock until it has written the end, so that two attempts of one rank never run
        side by side, even if the fork server of a killed control plane is late.
        """
        try:
            fresh = make_directory(self.directory)
            if not fresh and not stat.S_ISDIR(os.lstat(self.directory).st_mode):
                put_aside(self.directory)  # an earlier attempt replaced the directory by something else
                fresh = make_directory(self.directory)
            self.directory_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False  # the whole run was removed meanwhile
        try:
            fcntl.flock(self.directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not fresh and any(attempt > self.task["attempt"] for attempt in claimed_attempts(self.directory)):
            return False
        me = {
            "pid": os.getpid(),
            "start": start_time(os.getpid()),
            "boot": self.server.boot,
            "claimed_at": self.now(),
            "gpus": self.task["gpus"],
            "cgroups": [group["path"] for group in self.task["cgroups"]],
            "tombstone": False,
        }
        record = create_record(self.file("record"), [("claim", me)])
        if record is None:
            return False
        self.record = record
        with suppress(OSError):  # a rank that fails repeatedly must not fill the disk
            os.unlink(f"{self.directory}/{self.task['attempt'] - LOGS_KEPT}.log")
        return True

    def execute(self) -> tuple[int, str] | None:
        """Execute the rank's program. Return an exit code and a sentence if it could not be executed.

        The rank inherits its directory, control groups and limits: the supervisor enters them, spawns, and leaves them.
        A fork that set them up itself would first copy a good part of the supervisor's memory.
        """
        try:
            log = create_log(self.file("log"))
        except OSError as error:
            return CANNOT_EXECUTE, f"cannot write the log: {error.strerror}"
        if self.user is not None:
            os.fchown(log, *self.user)  # a rank that opens /dev/stderr opens this file again
        self.log = LogLimit(log, self.directory_fd, self.request["log_limit"])
        problem = enter(self.request["cwd"])
        if problem is None:
            groups = self.task["cgroups"]
            joined = [group for group in groups if make_cgroup(group["path"]) and join_cgroup(group["path"])]
            try:
                with memory_rlimit(None if any(g["limits_memory"] for g in joined) else self.request["memory_limit"]):
                    problem = self.spawn_when_possible(log)
            finally:
                os.chdir("/")
                if not all([join_cgroup(group["home"]) for group in joined]):
                    self.task["kill_file"] = self.task["freezer"] = None  # they would kill the supervisor as well
            problem = problem or self.set_limits(joined)
        if problem is None:
            self.log.arm()
        return problem

    def spawn_when_possible(self, log: int) -> tuple[int, str] | None:
        """Spawn the rank, and retry a passing shortage of processes or memory until the rank is asked to stop."""
        pause = START_AGAIN_AFTER_SECONDS
        while True:
            try:
                return self.spawn(log)
            except OSError as error:
                self.tell(f"short {error.strerror}")
            arrived = self.wakeup.wait(time.monotonic() + pause)
            pause = min(2 * pause, START_AGAIN_AT_MOST_SECONDS)
            if signal.SIGTERM in arrived:
                self.read_stop()
            if self.asked_to_stop or signal.SIGUSR1 in arrived:
                self.asked_to_stop = True
                return CANNOT_EXECUTE, "it was stopped before it could be started"

    def spawn(self, log: int) -> tuple[int, str] | None:
        """Spawn the rank as its user; raise `OSError` for a shortage that may pass."""
        with real_user(self.user):
            if self.user is not None and not os.access(".", os.X_OK):
                return CANNOT_EXECUTE, f"the user that ranks run as may not enter the directory {self.request['cwd']}"
            return self.spawn_as_real_user(log)

    def spawn_as_real_user(self, log: int) -> tuple[int, str] | None:
        argv = self.task["argv"] or self.request["argv"]
        program = argv[0]
        env = {**self.request["env"], **self.task["env"]}
        denied = False
        for path in candidates(program, env.get("PATH", DEFAULT_PATH)):
            try:
                self.rank_pid = os.posix_spawn(
                    path,
                    argv,
                    env,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, log, 1),
                        (os.POSIX_SPAWN_DUP2, log, 2),
                    ],
                    resetids=self.user is not None,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=self.server.changed_signals,
                )
            except (FileNotFoundError, NotADirectoryError):
                if os.path.isfile(path):
                    return NOT_FOUND, f"the interpreter that {path} names in its first line is not there"
            except PermissionError:
                denied = True
            except OSError as error:
                if error.errno in SHORTAGES:
                    raise
                return CANNOT_EXECUTE, exec_problem(program, error)
            except (ValueError, NotImplementedError) as error:  # arguments that this system's C library rejects
                return CANNOT_EXECUTE, f"cannot execute {program}: {error}"
            else:
                return None
        return (CANNOT_EXECUTE, f"not executable: {program}") if denied else (NOT_FOUND, f"no such program: {program}")

    def set_limits(self, joined: list[CgroupTask]) -> tuple[int, str] | None:
        """Limit the rank's groups once the supervisor has left them: the kernel might kill it for memory, too."""
        for group in joined:
            for name, value in group["settings"]:
                path = os.path.join(group["path"], name)
                if os.path.exists(path) and not write_file(path, value.encode()):
                    self.kill_at = 0.0
                    self.wait()
                    return CANNOT_EXECUTE, f"cannot set its limit: {name} = {value}"
        return None

    def wait(self) -> int:
        """Return the rank's wait status once the rank and every process that it started are gone.

        The supervisor is the subreaper: every process of the rank, daemons too, becomes its child once its parents are
        gone. So "no child is left" means that no process of the rank is left.
        """
        status: int | None = None
        while True:
            left = True
            while True:
                try:
                    pid, ended = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    left = False
                    break
                if pid == 0:
                    break
                if pid == self.rank_pid:
                    status, self.finished_at = ended, self.now()
            if status is not None:
                if not left:
                    return status
                if not self.asked_to_stop:
                    self.kill_at = min(self.kill_at, time.monotonic())
            if time.monotonic() >= self.kill_at:
                self.kill_tree()
                self.kill_at = time.monotonic() + self.kill_pause
                self.kill_pause = min(2 * self.kill_pause, KILL_AGAIN_AT_MOST_S)
            self.sleep(rank_runs=status is None)

    def sleep(self, *, rank_runs: bool) -> None:
        """Sleep until a child ends, a stop is requested, output is written, or a timer is due; then handle it."""
        assert self.log is not None
        until = min(self.kill_at, self.log.check_at)
        arrived = self.wakeup.wait(until)
        if rank_runs or self.asked_to_stop:
            self.stop_if_asked(arrived)
        if signal.SIGIO in arrived:
            self.log.output_came()
        if time.monotonic() >= self.log.check_at:
            self.log.trim()

    def stop_if_asked(self, arrived: bytes) -> None:
        """Stop on SIGTERM, as the stop file says, and on SIGUSR1, sent when the disk had no room for that file."""
        asked_before = self.asked_to_stop
        if signal.SIGTERM in arrived:
            self.read_stop()
        if signal.SIGUSR1 in arrived:
            self.take_stop(self.request["grace"])
        if self.asked_to_stop and not asked_before:
            send_to_group(self.rank_pid, signal.SIGTERM)

    def read_stop(self) -> None:
        try:
            self.take_stop(float(json.loads(read_file(self.file("stop")))["grace"]))
        except FileNotFoundError:
            return
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
        ):  # an unusable stop file is still a request to stop
            self.take_stop(self.request["grace"])

    def take_stop(self, grace: float) -> None:
        """Record the request to stop. A later request may shorten the grace, never lengthen it."""
        self.asked_to_stop = True
        self.kill_at = min(self.kill_at, time.monotonic() + grace)

    def kill_tree(self) -> None:
        """Send SIGKILL to every process of the rank. The cgroup reaches ones forked meanwhile; the walk, the rest."""
        if sys.platform != "linux":
            send_to_group(self.rank_pid, signal.SIGKILL)
            return
        killed = kill_cgroup(self.task["kill_file"]) or kill_frozen(self.task["freezer"])
        if not killed or self.kill_pause > KILL_AGAIN_AFTER_S:
            for pid in descendants(os.getpid()):
                with suppress(OSError):  # the process has ended meanwhile
                    os.kill(pid, signal.SIGKILL)

    def finish(self, *, exit_code: int | None, killer: str | None = None, start_error: str | None = None) -> None:
        """Write the exit record, retrying until it is written: no other process knows how the rank ended."""
        memory_kills = read_memory_kills(self.task["memory_events"])
        stopped = self.asked_to_stop
        record = {
            "exit_code": exit_code,
            "signal": killer,
            "reason": reason_of(exit_code, killer, memory_kills=memory_kills, stopped=stopped, start_error=start_error),
            "finished_at": self.finished_at or self.now(),
            "oom_kills": memory_kills,
            "stopped": stopped,
            "by_platform": False,
            "start_error": start_error,
        }
        while True:
            try:
                self.record = in_place(self.record, self.directory, self.file("record"))
                append(self.record, "exit", record)
                break
            except FileNotFoundError:  # the directory of all runs was removed: no reader is left
                break
            except OSError:
                time.sleep(TRY_TO_WRITE_AGAIN_S)
        fcntl.flock(self.directory_fd, fcntl.LOCK_UN)  # the reader of the end may start the next attempt at once
        # Notify readers before syncing: a line lost in a power cut reads as an unknown end, never as a false one.
        self.tell("ended")
        with suppress(OSError):  # there is no remedy for a failing disk here
            os.fsync(self.record)
            os.fsync(self.directory_fd)  # else the file may survive without its name
        for group in reversed(self.task["cgroups"]):
            remove_cgroup(group["path"])

    def tell(self, what: str) -> None:
        """Wake the control plane, if one runs. It reads the files itself, so a lost message costs only time."""
        task = self.task
        try:
            fd = os.open(self.request["wake"], os.O_WRONLY | SAFELY)
        except OSError:
            return
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):  # the leading newline ends whatever a rank wrote before
                os.write(fd, f"\n{task['instance']} {task['rank']} {task['attempt']} {what}\n".encode())
        os.close(fd)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ForkServer(control=0).serve()
