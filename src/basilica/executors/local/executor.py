"""The executor that runs replicas as processes of this machine.

Each gang has a directory and a warden, a process that drives the local runtime (`basilica.runtimes.local`): the same
fork server, supervisors, exit records and logs that the control plane uses. The executor itself has no thread and no
event loop, so it works in scripts, in notebooks, and in processes that fork.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from basilica.core.errors import BadResult, BasilicaError
from basilica.executors.arguments import (
    DAY_SECONDS,
    allow_unknown_handle,
    check_launch,
    check_lines,
    check_run_id,
    check_seconds,
    check_timeout,
    named_in,
    new_gang_name,
)
from basilica.executors.environment import RANK_ENV, replica_environment
from basilica.executors.launch import gang_handles, gang_metadata, import_path, replica_command, shipped_function
from basilica.executors.local.gang import CHANGES, Gang, State, Task, watch_changes
from basilica.executors.outcomes import Changes, Outcome, placeholder, replica_result
from basilica.executors.protocol import (
    CULPRIT,
    ENDED,
    FAILED,
    LAUNCH_SECONDS,
    LOG_LINES,
    PENDING,
    STOPPED,
    VICTIM,
    Entrypoint,
    OnChange,
    ReplicaHandle,
    ReplicaResult,
)
from basilica.machine.places import default_state_dir, start_of

GRACE_SECONDS = 10.0
CLOSE_SECONDS = 10.0  # `close` waits so much longer than the grace
KEPT_SECONDS = 7 * DAY_SECONDS
ARGUMENT_BYTES_MAX = 100_000  # the rest goes into a file: the kernel limits the length of a variable

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class LocalProcessExecutor:
    """Replicas as processes of this machine, each in a process group of its own, with its output in a file.

    Replicas share the caller's directory, environment, Python and modules. No replica outlives its executor: the end of
    the `with` block, `close()`, and the end of the process, however it ends, stop running replicas. With `detach=True`
    replicas continue, and their handles work in any process. Files of a gang are kept for a week.

    >>> with LocalProcessExecutor() as executor:                                               # doctest: +SKIP
    ...     handles = executor.launch_replicas(2, "my_package.train:main", {"steps": 10})
    ...     print(executor.collect(handles))
    """

    backend_name = "local"
    supports_inter_replica_network = True

    def __init__(
        self,
        *,
        state_dir: str | Path | None = None,
        detach: bool = False,
        grace_seconds: float = GRACE_SECONDS,
        run_id: str = "local",
    ) -> None:
        """`grace_seconds` is the time between SIGTERM and SIGKILL; `run_id` is the prefix of gang names."""
        check_seconds("grace_seconds", grace_seconds)
        self._run_id = check_run_id(run_id, _RUN_ID, "a name of a directory: letters, digits, '.', '_' and '-'")
        base = default_state_dir() / "executors" if state_dir is None else Path(state_dir).expanduser()
        self._base = base.absolute()
        self._grace = grace_seconds
        self._detach = detach
        self._gangs: list[tuple[Gang, int]] = []
        self._close = weakref.finalize(self, _close, os.getpid(), self._gangs, grace_seconds, detach)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = LAUNCH_SECONDS,
    ) -> list[ReplicaHandle]:
        """Start the gang. With `gpu`, whatever its name, each replica sees one GPU of this machine; a gang larger than
        their number shares them. Where there is none, it runs on the CPU.
        """
        check_launch(n_replicas, entrypoint, entrypoint_args, timeout, callables=True)
        if not self._close.alive:
            raise RuntimeError("this executor is closed: make another")
        self._remove_old()
        job = new_gang_name(self._run_id)
        directory = self._base / job
        directory.mkdir(mode=0o700, parents=True)
        try:
            argv, env = _program(entrypoint, entrypoint_args, n_replicas, directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        task = Task(
            job=job,
            directory=str(directory),
            argv=argv,
            env={**os.environ, **env, "REPLICA_JOB": job},
            rank_names=["REPLICA_RANK", *([entrypoint_args[RANK_ENV]] if entrypoint_args.get(RANK_ENV) else [])],
            workdir=os.getcwd(),
            replicas=n_replicas,
            gpus=gpu is not None,
            grace=self._grace,
            timeout=timeout,
            owner=None if self._detach else (os.getpid(), start_of(os.getpid()) or 0),
        )
        gang = Gang(directory, job)
        try:
            _start_warden(task)
        except BaseException:  # Ctrl-C, too: replicas that have started already are stopped
            _stop([(gang, n_replicas)], 0.0)
            _remove(directory)
            raise
        self._gangs.append((gang, n_replicas))
        metadata = gang_metadata(entrypoint_args, job_name=job, directory=str(directory))
        return gang_handles(self.backend_name, n_replicas, metadata)

    def poll(self, handle: ReplicaHandle) -> str:
        return _gang(handle).state(handle.rank).status

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        check_lines(n_lines)
        gang = _gang(handle)
        lines = gang.lines(handle.rank, n_lines)
        if not lines:
            status = gang.state(handle.rank).status
            return placeholder(handle.rank, "not started / no logs yet" if status == PENDING else "no logs")
        return "".join(f"{line}\n" for line in lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Send SIGTERM to this replica and, after the grace, SIGKILL to all its processes. Other replicas continue."""
        with allow_unknown_handle():
            _gang(handle).cancel(handle.rank, self._grace)

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until every replica has ended; `timeout=None` waits a day. The gang's files wake it where they can."""
        seconds = check_timeout(timeout)
        deadline = time.monotonic() + seconds
        gangs = _gangs(handles)
        changes = Changes(on_change)
        states: dict[int, State] = {}
        while True:
            waiting = [place for place, state in enumerate(handles) if not _over(states.get(place))]
            wanted: dict[Gang, list[int]] = {}
            for place in waiting:
                wanted.setdefault(gangs[place], []).append(handles[place].rank)
            with watch_changes(wanted) as bell:
                for place in waiting:
                    states[place] = gangs[place].state(handles[place].rank)
                    changes.notify(place, handles[place], states[place].status)
                left = deadline - time.monotonic()
                if left <= 0 or all(_over(state) for state in states.values()):
                    return _results(handles, gangs, states, seconds)
                bell.wait(left)

    def close(self) -> None:
        """Stop running replicas and wait for their end; `RuntimeError` if some remain. With `detach`, let them run."""
        left = self._close()
        self._gangs.clear()
        if left:
            raise RuntimeError(f"could not stop {', '.join(left)}")

    def __enter__(self) -> "LocalProcessExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_old(self) -> None:
        """Stop gangs whose warden and owner are dead, and remove those without a change for a week.

        A gang whose warden is alive is kept, whatever its age.
        """
        with contextlib.suppress(OSError):
            for directory in self._base.iterdir():
                gang, file = Gang(directory, directory.name), directory / CHANGES
                if gang.is_abandoned:
                    gang.end_abandoned(self._grace)
                elif file.exists() and time.time() - file.stat().st_mtime > KEPT_SECONDS and not gang.is_supervised:
                    _remove(directory)


# ---- the program of a replica ------------------------------------------------------------------------------------


def _program(
    entrypoint: Entrypoint, arguments: Mapping[str, Any], n_replicas: int, directory: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a replica and the variables of its environment."""
    if isinstance(entrypoint, str):
        plain, file = _arguments(arguments, directory)
        env = replica_environment(n_replicas, entrypoint, plain, remote=False)
        if file is not None:
            env["REPLICA_ARGS_FILE"] = str(file)
        env["PYTHONPATH"] = import_path()
        return replica_command(sys.executable), env
    return shipped_function(entrypoint, arguments, n_replicas, python=sys.executable, remote=False)


def _arguments(arguments: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the arguments that travel as JSON, and the file with the rest: other objects, and long ones."""
    plain: dict[str, Any] = {}
    others: dict[str, Any] = {}
    room = ARGUMENT_BYTES_MAX
    for name, value in arguments.items():
        try:
            text = json.dumps(value, allow_nan=False)
            same = json.loads(text) == value
        except (TypeError, ValueError):
            text, same = "", False
        room -= len(text.encode())
        (plain if same and room > 0 else others)[name] = value
    if not others:
        return plain, None
    file = directory / "arguments.pickle"
    for name, value in others.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # whatever the object's own code raises
            raise ValueError(f"the argument {name!r} ({type(value).__name__}) cannot travel: {error}") from error
    file.write_bytes(pickle.dumps(others))
    return plain, file


def _start_warden(task: Task) -> None:
    """Start the warden and wait until it has started the replicas; raise the error that it answers instead."""
    directory = Path(task["directory"])
    with (directory / "warden.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "basilica.executors.local.warden"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": import_path()},
            start_new_session=True,  # a Ctrl-C at the caller's terminal is the caller's
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.close()
        answer = process.stdout.readline()
    process.wait()
    if answer and "launched" in json.loads(answer):
        return
    problem = json.loads(answer)["error"] if answer else (directory / "warden.log").read_text()[-2000:].strip()
    raise BasilicaError(f"could not launch the replicas: {problem or 'their warden was killed'}")


# ---- results -----------------------------------------------------------------------------------------------------


def _gang(handle: ReplicaHandle) -> Gang:
    directory, job = (named_in(handle, LocalProcessExecutor.backend_name, key) for key in ("directory", "job_name"))
    return Gang(Path(directory), job)


def _gangs(handles: Sequence[ReplicaHandle]) -> list[Gang]:
    """Return the gang of each handle; handles of one gang share the object."""
    made: dict[Path, Gang] = {}
    return [made.setdefault(gang.directory, gang) for gang in map(_gang, handles)]


def _over(state: State | None) -> bool:
    return state is not None and state.status in ENDED


def _results(
    handles: Sequence[ReplicaHandle], gangs: Sequence[Gang], states: Mapping[int, State], seconds: float
) -> list[ReplicaResult]:
    failed: dict[str, list[int]] = {}
    for place, state in states.items():
        if state.status == FAILED:
            failed.setdefault(gangs[place].job, []).append(place)
    first = {
        job: culprit for job, places in failed.items() if (culprit := _culprit(handles, places, states)) is not None
    }
    results = []
    for place, handle in enumerate(handles):
        state, gang = states[place], gangs[place]
        error = state.error
        culprit = first.get(gang.job)
        if state.status == FAILED and culprit is not None and len(failed[gang.job]) > 1:
            error = f"{error}; {'it' if culprit == handle.rank else f'rank {culprit}'} failed first"
        value = None
        try:
            value = gang.result(handle.rank) if _over(state) else None
        except BadResult as problem:  # the other replicas' results are still good
            error = "; ".join(filter(None, (error, str(problem))))
        role = _role(handle.rank, culprit, state)
        results.append(replica_result(handle, Outcome(state.status, state.exit_code, error, value, role), seconds))
    return results


def _culprit(handles: Sequence[ReplicaHandle], failed: Sequence[int], states: Mapping[int, State]) -> int | None:
    """Return the rank that failed first by itself; None if all were stopped, or their times are unknown."""
    ends = [(states[place].ended_at, handles[place].rank) for place in failed if not states[place].stopped]
    return min(((at, rank) for at, rank in ends if at is not None), default=(0.0, None))[1]


def _role(rank: int, culprit: int | None, state: State) -> str | None:
    if state.stopped:
        return STOPPED
    if culprit is None:
        return None
    return CULPRIT if rank == culprit else VICTIM


def _close(owner: int, gangs: list[tuple[Gang, int]], grace: float, detach: bool) -> list[str]:
    """Stop all gangs and wait; return the names of those that remain. A forked child owns none, and stops none."""
    return [] if detach or os.getpid() != owner else _stop(gangs, grace)


def _remove(directory: Path) -> None:
    """Remove a gang's directory: rename it first, so that a late supervisor finds all of it, or nothing.

    If the files vanished one by one, the supervisor could miss the cancellation and start its replica.
    """
    removed = directory.with_name(f".{directory.name}")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _stop(gangs: list[tuple[Gang, int]], grace: float) -> list[str]:
    for gang, size in gangs:
        for rank in range(size):
            gang.cancel(rank, grace)
    deadline = time.monotonic() + grace + CLOSE_SECONDS
    late = [(gang, size) for gang, size in gangs if not gang.wait_until_over(size, deadline)]
    for gang, size in late:
        for rank in range(size):
            gang.kill(rank)
    deadline = time.monotonic() + CLOSE_SECONDS
    return [gang.job for gang, size in late if not gang.wait_until_over(size, deadline)]
