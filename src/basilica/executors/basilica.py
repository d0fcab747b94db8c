"""Replicas as the ranks of a run of a Basilica control plane: embedded on this machine, or a cluster's.

The run is a gang: a replica that fails ends the others, and the cancellation of one cancels the run. The server pushes
changes; `collect` waits for a server that is away for a while.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from basilica.core.ends import COMPLETED, ERROR, UNKNOWN, is_signal
from basilica.core.errors import BadResult, BasilicaError, DeploymentNotFound, NetworkError
from basilica.core.world import WorldSize
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
from basilica.executors.launch import gang_handles, gang_metadata, import_path, replica_command, shipped_function
from basilica.executors.outcomes import Changes, Outcome, placeholder, replica_result
from basilica.executors.protocol import (
    CANCELLED,
    CULPRIT,
    FAILED,
    LAUNCH_SECONDS,
    LOG_LINES,
    PENDING,
    RUNNING,
    STOPPED,
    SUCCEEDED,
    VICTIM,
    Entrypoint,
    OnChange,
    ReplicaHandle,
    ReplicaResult,
)

if TYPE_CHECKING:
    from basilica.client.api import BasilicaClient
    from basilica.client.effects import Flow
    from basilica.client.flows import Remembered
    from basilica.client.training import DistributedTraining
    from basilica.client.views import RankExit, RunView

STATES = {
    "waiting": PENDING,
    "launched": PENDING,
    "running": RUNNING,
    "stopping": RUNNING,
    "succeeded": SUCCEEDED,
    "lost": FAILED,
    "dropped": CANCELLED,
}
POLL_SECONDS = 1.0  # at a server that does not push changes
LONG_POLL_SECONDS = 30.0
# A shipped function finds its rank as all replicas do; our own entrypoint sets the variable itself.
WITH_RANK = ["/bin/sh", "-c", 'export REPLICA_RANK="$RANK"; exec "$0" "$@"']
GONE = Outcome(CANCELLED, error="there is no such run (any more)")


class BasilicaExecutor:
    """Replicas as the ranks of a run of a control plane.

    `base_url` and `api_key` as for `BasilicaClient`: without them the embedded server of this machine is used, or the
    saved login. On an embedded server replicas run where the caller is, with its modules; elsewhere the module of the
    entrypoint and basilica must be in the `image`, or the entrypoint is a function, which is shipped.
    """

    backend_name = "basilica"
    supports_inter_replica_network = True

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        client: "BasilicaClient | None" = None,
        image: str = "",
        run_id: str | None = None,
        cpu: str | float | None = None,
        memory: str | None = None,
        grace_seconds: float = 10.0,
    ) -> None:
        from basilica.client.api import BasilicaClient  # noqa: PLC0415  it loads the HTTP client

        self._client = client or BasilicaClient(base_url, api_key)
        self._run_id = run_id or RUN_ID
        self._options: dict[str, Any] = {"image": image, "cpu": cpu, "memory": memory, "grace_seconds": grace_seconds}

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = LAUNCH_SECONDS,
    ) -> list[ReplicaHandle]:
        """Start the run. `gpu` is a model: each replica gets one such GPU."""
        check_launch(n_replicas, entrypoint, entrypoint_args, timeout, callables=True)
        command, env = self._program(n_replicas, entrypoint, entrypoint_args)
        name = new_gang_name(self._run_id)
        try:
            training = self._client.deploy_distributed(
                name,
                command=command,
                env={**env, "REPLICA_JOB": name},
                world_size=WorldSize(n_replicas, n_replicas, n_replicas),
                gpu_count=0 if gpu is None else 1,
                gpu_models=[] if gpu is None else [gpu],
                deadline_seconds=timeout,
                wait=False,
                **self._options,
            )
        except KeyboardInterrupt as interrupt:  # the run may exist all the same, without a handle
            try:
                self.cancel(ReplicaHandle(0, self.backend_name, {"job_name": name}))
            except BasilicaError as error:
                interrupt.add_note(f"the run {name} may be there all the same: {error}")
            raise
        return gang_handles(self.backend_name, n_replicas, gang_metadata(entrypoint_args, job_name=training.name))

    def poll(self, handle: ReplicaHandle) -> str:
        try:
            view = self._training(handle).refresh().view
        except DeploymentNotFound:
            return CANCELLED
        return _outcome(view, handle.rank).status

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        check_lines(n_lines)
        try:
            text = self._training(handle).logs(rank=handle.rank, tail=n_lines)
        except DeploymentNotFound:
            return placeholder(handle.rank, "there is no such run")
        return text or placeholder(handle.rank, "not started / no logs yet")

    def cancel(self, handle: ReplicaHandle) -> None:
        """Cancel the run, and with it all its replicas."""
        with allow_unknown_handle(), suppress(DeploymentNotFound):
            self._training(handle).cancel()

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until the runs cannot change any more; `timeout=None` waits a day."""
        seconds = check_timeout(timeout)
        deadline = time.monotonic() + seconds
        changes = Changes(on_change)
        runs: dict[str, list[int]] = {}
        for place, handle in enumerate(handles):
            runs.setdefault(named_in(handle, self.backend_name, "job_name"), []).append(place)
        results: dict[int, ReplicaResult] = {}
        for places in runs.values():
            training = self._training(handles[places[0]])
            view = None
            try:
                for view in self._client._blocking.iterate(_states(training._run, deadline)):
                    for place in places:
                        changes.notify(place, handles[place], _outcome(view, handles[place].rank).status)
                values = self._returned(training) if view is not None and view.is_terminal else {}
            except DeploymentNotFound:
                view, values = None, {}
            for place in places:
                rank = handles[place].rank
                outcome = GONE if view is None else _with_result(_outcome(view, rank), values.get(rank))
                results[place] = replica_result(handles[place], outcome, seconds)
        return [results[place] for place in range(len(handles))]

    def close(self) -> None:
        """Close the connections; runs go on."""
        self._client.close()

    def __enter__(self) -> "BasilicaExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _returned(self, training: "DistributedTraining") -> dict[int, Any]:
        """Return the results of ranks, also of a run that failed: some ranks may have done their work."""
        from basilica.client import flows  # noqa: PLC0415

        try:
            return self._client._blocking.run(flows.results_so_far(training._run))
        except DeploymentNotFound:  # deleted after its end was seen
            return {}

    def _training(self, handle: ReplicaHandle) -> "DistributedTraining":
        from basilica.client.training import DistributedTraining  # noqa: PLC0415

        return DistributedTraining(self._client, named_in(handle, self.backend_name, "job_name"))

    def _program(
        self, n_replicas: int, entrypoint: Entrypoint, arguments: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        here = self._client.is_embedded
        python = sys.executable if here else "python3"
        if isinstance(entrypoint, str):
            env = replica_environment(n_replicas, entrypoint, arguments, remote=True)
            return replica_command(python), {**env, "PYTHONPATH": import_path()} if here else env
        argv, env = shipped_function(entrypoint, arguments, n_replicas, python=python, remote=not here)
        return [*WITH_RANK, *argv], env


def _states(run: "Remembered", deadline: float) -> "Flow[None]":
    """Emit the run, and again after each change, until it cannot change any more or the time is up."""
    from basilica.client import flows  # noqa: PLC0415
    from basilica.client.effects import Call, Emit, Now, Sleep  # noqa: PLC0415
    from basilica.client.views import parse_run  # noqa: PLC0415

    view = yield from flows.fetch(run)
    yield Emit(view)
    while not (view.settled or (view.is_terminal and not view.tells_changes)):
        left = deadline - (yield Now())
        if left <= 0:
            return
        try:
            if view.tells_changes:
                hold = min(left, LONG_POLL_SECONDS)
                params = {"since": view.version, "wait": f"{hold:.3f}"}
                call = Call(method="GET", path=f"{run.path}/watch", params=params, timeout=hold + 15)
                answer = yield from flows.ask(call, name=run.name, patience=left + flows.LAST_POLL)
                newer = answer.parsed(parse_run)
            else:
                yield Sleep(min(left, POLL_SECONDS))
                newer = yield from flows.fetch(run, left)
        except NetworkError:
            continue  # the run goes on; the deadline limits the wait
        if newer != view:
            view = run.take(newer)
            yield Emit(view)


# ---- ranks in the view of a run ----------------------------------------------------------------------------------


def _with_result(outcome: Outcome, value: Any) -> Outcome:
    """Add the replica's result; if it cannot be read, the reason, so that the others' results are still returned."""
    if isinstance(value, BadResult):
        return outcome._replace(error="; ".join(filter(None, (outcome.error, str(value)))))
    return outcome._replace(result=value)


def _outcome(view: "RunView", rank: int) -> Outcome:
    exit = next((exit for exit in view.exits if exit.rank == rank), None)
    if view.is_terminal:
        return _ended(view, rank, exit)
    state = next((seen.state for seen in view.ranks if seen.rank == rank), "waiting")
    status = STATES.get(state, PENDING)
    # Until the run is over a stopped rank may come back, and the end of a failed one is not published.
    return Outcome(status if status not in (FAILED, CANCELLED) else RUNNING)


def _ended(view: "RunView", rank: int, exit: "RankExit | None") -> Outcome:
    if view.phase == SUCCEEDED or (exit is not None and exit.exit_code == 0):
        return Outcome(SUCCEEDED, 0)
    if view.phase == CANCELLED:
        return Outcome(CANCELLED, error=view.message or "cancelled")
    code = exit.exit_code if exit is not None and exit.exit_code > 0 else None
    culprit = view.culprit
    if culprit is None:
        return Outcome(FAILED, code, view.message or "the run failed")
    if culprit.rank == rank:
        return Outcome(FAILED, code, _why(culprit.termination_reason, code, culprit.log_tail), role=CULPRIT)
    because = f"rank {culprit.rank} failed first"
    if exit is None or exit.role == "stopped":
        return Outcome(FAILED, code, f"stopped, since {because}", role=STOPPED)
    return Outcome(FAILED, code, f"{_why(exit.termination_reason, code, exit.log_tail)}; {because}", role=VICTIM)


def _why(reason: str, code: int | None, tail: Sequence[str]) -> str:
    """Describe an end by its signal or reason, else by its exit code and last line."""
    if reason not in (ERROR, UNKNOWN, COMPLETED):
        return f"killed by {reason}" if is_signal(reason) else f"{reason} (exit code {code})"
    if code is None:
        return "nobody knows how it ended"
    last = next((line for line in reversed(tail) if line.strip()), "")
    return f"exited with code {code}" + (f": {last}" if last else "")
