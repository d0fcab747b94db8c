"""Replicas as calls of a deployed Modal function, each independent: Modal knows no gangs.

Deploy once, with whatever image, volumes and secrets the replicas need; basilica and the module of the entrypoint must
be in the image:

    import modal
    from basilica.executors.modal import run_replica

    app = modal.App("diloco")
    app.function(name="replica", image=image, serialized=True)(run_replica)

Then `ModalSpawnExecutor("diloco", "replica")` spawns calls of it. Written against the interfaces of the `modal` package
(its signatures are compared in the tests) and tried with a stand-in of its client that runs the calls as local
processes. Not tried against Modal's service: containers, GPUs, how soon a cancelled call ends, what its log service
keeps.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from basilica.core import environment as env
from basilica.core.ends import describe, exit_code_of
from basilica.executors.arguments import (
    RUN_ID,
    allow_unknown_handle,
    check_launch,
    check_lines,
    check_timeout,
    named_in,
    new_gang_name,
)
from basilica.executors.environment import replica_environment
from basilica.executors.launch import gang_metadata, replica_command, start_each
from basilica.executors.outcomes import Changes, Outcome, placeholder, replica_result
from basilica.executors.protocol import (
    CANCELLED,
    ENDED,
    FAILED,
    LAUNCH_SECONDS,
    LOG_LINES,
    PENDING,
    RUNNING,
    SUCCEEDED,
    Entrypoint,
    OnChange,
    ReplicaHandle,
    ReplicaResult,
)
from basilica.reports.tracebacks import read_traceback
from basilica.version import pip_install

GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL, when a replica's time is up or its call is cancelled
START_SECONDS = 60  # by which Modal's own limit is longer than ours: only ours gives a reason
LOG_ENTRIES_MAX = 20_000
WAITS_AT_ONCE = 64


class ModalSpawnExecutor:
    """Replicas as calls of a Modal function that was deployed with `run_replica` (see the module).

    `modal_package` stands in for the `modal` package, in tests.
    """

    backend_name = "modal"
    supports_inter_replica_network = False

    def __init__(
        self,
        app_name: str,
        function_name: str = "replica",
        *,
        environment_name: str | None = None,
        run_id: str | None = None,
        modal_package: Any = None,
    ) -> None:
        if modal_package is None:
            try:
                import modal as modal_package  # noqa: PLC0415  each optional package is loaded by its executor
            except ImportError:
                raise RuntimeError(f"ModalSpawnExecutor needs modal: {pip_install('modal')}") from None
        self._modal = modal_package
        self._app_name = app_name
        self._function_name = function_name
        self._environment_name = environment_name
        self._run_id = run_id or RUN_ID

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = LAUNCH_SECONDS,
    ) -> list[ReplicaHandle]:
        """Spawn the calls. `gpu` is Modal's name of one. If one cannot be spawned, those before it are cancelled."""
        check_launch(n_replicas, entrypoint, entrypoint_args, timeout, callables=False)
        job = new_gang_name(self._run_id)
        common = replica_environment(n_replicas, str(entrypoint), entrypoint_args, remote=True) | {"REPLICA_JOB": job}
        options: dict[str, Any] = {"timeout": math.ceil(timeout + GRACE_SECONDS) + START_SECONDS}
        if gpu is not None:
            options["gpu"] = gpu
        named = self._modal.Function.from_name(
            self._app_name, self._function_name, environment_name=self._environment_name
        )
        function = named.with_options(**options)
        metadata = gang_metadata(entrypoint_args, job_name=job)

        def spawn(rank: int) -> ReplicaHandle:
            call = function.spawn({**common, "REPLICA_RANK": str(rank)}, timeout)
            own = {"function_call_id": call.object_id, "rank": rank}
            return ReplicaHandle(rank, self.backend_name, metadata | own)

        return start_each(n_replicas, spawn, self.cancel, known_as="function_call_id")

    def poll(self, handle: ReplicaHandle) -> str:
        return self._inspect(handle, 0.0).status

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        check_lines(n_lines)
        call = self._call(handle)
        try:
            text = "".join(entry.message for entry in call.logs.tail(min(n_lines, LOG_ENTRIES_MAX)))
        except self._modal.exception.NotFoundError:
            return placeholder(handle.rank, "no such function call")
        lines = text.splitlines()[-n_lines:]
        if not lines:
            return placeholder(handle.rank, "call not started / no logs yet")
        return "".join(f"{line}\n" for line in lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Cancel this replica's call; the others go on."""
        with allow_unknown_handle(), suppress(self._modal.exception.NotFoundError):
            self._call(handle).cancel()

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until every call has ended; `timeout=None` waits a day.

        Each call is waited for by a thread of its own, at most 64 at a time: Modal answers when a call has ended, and
        has no answer for several at once.
        """
        seconds = check_timeout(timeout)
        deadline = time.monotonic() + seconds
        changes = Changes(on_change)
        outcomes: dict[int, Outcome] = {}
        for place, handle in enumerate(handles):
            outcomes[place] = self._inspect(handle, 0.0)
            changes.notify(place, handle, outcomes[place].status)
        waiting = [place for place, outcome in outcomes.items() if outcome.status not in ENDED]
        for place, outcome in _Ends(self._inspect, handles, waiting, deadline):
            outcomes[place] = outcome
            changes.notify(place, handles[place], outcome.status)
        return [replica_result(handle, outcomes[place], seconds) for place, handle in enumerate(handles)]

    # ---- calls to Modal ------------------------------------------------------------------------------------------

    def _call(self, handle: ReplicaHandle) -> Any:
        return self._modal.FunctionCall.from_id(named_in(handle, self.backend_name, "function_call_id"))

    def _inspect(self, handle: ReplicaHandle, wait: float) -> Outcome:
        """Return the outcome as soon as the call has ended or the time is up. Connection errors are raised."""
        problems = self._modal.exception
        call = self._call(handle)
        try:
            answer = call.get(timeout=wait)
        except TimeoutError:
            return Outcome(self._unended(call, handle))
        except problems.NotFoundError:
            return Outcome(CANCELLED, error="there is no such function call")
        except problems.OutputExpiredError:
            return Outcome(FAILED, error="nobody knows any more how it ended: Modal has forgotten the call")
        except problems.InputCancellation:
            return Outcome(CANCELLED, error="cancelled")
        except (problems.RemoteError, problems.InternalFailure, problems.ExecutionError) as error:
            if self._input_status(call, handle) == "TERMINATED":
                return Outcome(CANCELLED, error="cancelled")
            return Outcome(FAILED, error=str(error) or type(error).__name__)
        except problems.FunctionTimeoutError as error:
            return Outcome(FAILED, error=f"stopped by Modal, since its time was up: {error}")
        if answer["exit_code"] == 0:
            return Outcome(SUCCEEDED, 0, result=answer["result"])
        return Outcome(FAILED, answer["exit_code"], answer["error"])

    def _unended(self, call: Any, handle: ReplicaHandle) -> str:
        """Return pending or running. Modal's status is `PENDING` for both, but only a running call has a container."""
        found = self._input(call, handle)
        return RUNNING if found is not None and found.task_id else PENDING

    def _input_status(self, call: Any, handle: ReplicaHandle) -> str | None:
        found = self._input(call, handle)
        return None if found is None else str(found.status.name)

    def _input(self, call: Any, handle: ReplicaHandle) -> Any:
        """Return the node of this call in the call graph."""
        nodes = list(call.get_call_graph())
        for node in nodes:
            nodes += node.children
            if node.function_call_id == handle.metadata["function_call_id"]:
                return node
        return None


class _Ends:
    """An iterator over (place, outcome) of several calls as they end; at the deadline, of the others."""

    def __init__(
        self,
        inspect: Callable[[ReplicaHandle, float], Outcome],
        handles: Sequence[ReplicaHandle],
        waiting: Sequence[int],
        deadline: float,
    ) -> None:
        self._inspect = inspect
        self._handles = handles
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()
        self._expected = len(waiting)
        self._deadline = deadline
        for place in waiting:
            self._todo.put(place)
        for _ in range(min(WAITS_AT_ONCE, len(waiting))):
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while True:
            try:
                place = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                left = max(0.0, self._deadline - time.monotonic())
                self._done.put((place, self._inspect(self._handles[place], left)))
            except BaseException as error:  # noqa: BLE001  raised by the iterator
                self._done.put((place, error))

    def __iter__(self) -> "_Ends":
        return self

    def __next__(self) -> tuple[int, Outcome]:
        if not self._expected:
            raise StopIteration
        self._expected -= 1
        place, outcome = self._done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return place, outcome


# ---- the deployed function ---------------------------------------------------------------------------------------


def run_replica(variables: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """The function to deploy: one replica as a process of its own, so that its exit code and its end are real."""
    with tempfile.TemporaryDirectory() as place:
        result_file, error_file = Path(place) / "result.json", Path(place) / "error.json"
        files = {env.RESULT_FILE: str(result_file), env.TORCH_ERROR_FILE: str(error_file)}
        process = subprocess.Popen(
            replica_command(sys.executable),
            env={**os.environ, **variables, **files},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
            problem = None
        except subprocess.TimeoutExpired:
            code, problem = _end(process), f"stopped, since it had not ended within {timeout:g} s"
        except BaseException:  # the call was cancelled
            _end(process)
            raise
        if code == 0 and problem is None:
            stored = json.loads(result_file.read_bytes()) if result_file.exists() else None
            return {"exit_code": 0, "result": stored}
        last_line = "".join(read_traceback(str(error_file)).splitlines()[-1:])
        exit_code = exit_code_of(code)
        how = describe(code)
        return {"exit_code": exit_code or 1, "error": problem or (f"{how}: {last_line}" if last_line else how)}


def _end(process: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM, and after the grace SIGKILL to the rest of its group."""
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _signal(process, signal.SIGKILL)
    return process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
