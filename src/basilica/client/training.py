"""The handle of a run: its last state, its operations and its waits, blocking or not.

Properties read the last answer; `refresh()` and the waits request a new one. Every method has an `_async` twin, and
both run the same flow.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from basilica.client import flows
from basilica.client.effects import NoAnswer
from basilica.client.flows import Remembered
from basilica.client.notebook import show_live, table
from basilica.client.views import (
    BenchResult,
    BenchStatus,
    Checkpoint,
    Culprit,
    Event,
    Goodput,
    Incident,
    PlannedChange,
    RankExit,
    RankStatus,
    RunView,
    Series,
)
from basilica.core import waits
from basilica.core.world import WorldStatus

if TYPE_CHECKING:
    from basilica.client.api import BasilicaClient

DELETE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DistributedMetrics:
    """The main metrics of a run, for a log line; the server's `/metrics` has the rest."""

    ready: int
    target: int
    restarts: int
    rank_seconds: float
    gpu_seconds: float


class DistributedTraining:
    """One run. `name` may be its instance name or its own name, which means the newest run of that name.

    As a context manager it cancels a live run on exit and keeps its record; with `delete_on_exit`, and where the server
    cannot cancel, it deletes the run.

    >>> training = basilica.DistributedTraining(client, "llama")      # doctest: +SKIP
    >>> training.scale(4)                                             # doctest: +SKIP
    >>> training.join()                                               # doctest: +SKIP
    """

    def __init__(
        self, client: "BasilicaClient", name: str, *, delete_on_exit: bool = False, _run: Remembered | None = None
    ) -> None:
        self._client = client
        self._run = _run or Remembered(name)
        self.delete_on_exit = delete_on_exit

    # ---- the last answer -------------------------------------------------------------------------------------------

    @property
    def _view(self) -> RunView:
        return self._run.view or self.refresh()._view

    @property
    def view(self) -> RunView:
        """The last answer as a whole."""
        return self._view

    @property
    def name(self) -> str:
        """The instance name, which is unique for ever."""
        return self._run.name if self._run.view is None else self._run.view.instance

    @property
    def friendly_name(self) -> str:
        return self._view.name

    @property
    def namespace(self) -> str:
        return self._view.namespace

    @property
    def rendezvous_endpoint(self) -> str:
        """`host:port` of the run's rendezvous, as its ranks see it."""
        rendezvous = (self._view.raw.get("distributed") or {}).get("rendezvous") or {}
        return str(rendezvous.get("endpoint", ""))

    @property
    def phase(self) -> str:
        return self._view.phase

    @property
    def is_terminal(self) -> bool:
        return self._view.is_terminal

    @property
    def message(self) -> str:
        return self._view.message

    @property
    def world(self) -> WorldStatus:
        return self._view.world

    @property
    def ranks(self) -> list[RankStatus]:
        return list(self._view.ranks)

    @property
    def rank_exits(self) -> list[RankExit]:
        """The exit of each rank; empty while the run is not over."""
        return list(self._view.exits)

    @property
    def culprit(self) -> Culprit | None:
        """The rank that failed first, if the run failed."""
        return self._view.culprit

    @property
    def worker_exits(self) -> list[RankExit]:
        """The latest failures of workers that torchrun agents started, also of a run that goes on."""
        return list(self._view.worker_exits)

    @property
    def goodput(self) -> Goodput | None:
        """The account of the run's time, up to the last answer; None from a server that keeps none.

        >>> print(training.goodput)                                   # doctest: +SKIP
        goodput 91.1 % (training 8 m 12 s of 9 m 0 s x 4 ranks; largest loss: rendezvous 21 s)
        """
        return self._view.goodput

    @property
    def incidents(self) -> list[Incident]:
        """The latest interruptions of the training with what each cost, the newest last."""
        return list(self._view.incidents)

    @property
    def notice(self) -> PlannedChange | None:
        """The planned change that ranks were told of and that is yet to happen."""
        return self._view.notice

    @property
    def bench(self) -> BenchResult | None:
        return None if self._view.bench is None else self._view.bench.result

    @property
    def bench_status(self) -> BenchStatus | None:
        return self._view.bench

    @property
    def bench_diagnostics(self) -> dict[str, Any] | None:
        """The server's own description of the probe, unchanged; None with the bench off."""
        bench = (self._view.raw.get("distributed") or {}).get("bench")
        return None if not bench or bench.get("mode") == "off" else dict(bench)

    def metrics(self) -> DistributedMetrics:
        """Request the metrics anew: the usage of a live run counts up to the request."""
        if not self._view.is_terminal:
            self.refresh()
        return self._metrics()

    async def metrics_async(self) -> DistributedMetrics:
        await self.refresh_async()
        return self._metrics()

    def _metrics(self) -> DistributedMetrics:
        view = self._view
        usage = (view.raw.get("distributed") or {}).get("usage") or {}
        return DistributedMetrics(
            ready=view.world.ready,
            target=view.world.target,
            restarts=sum(r.restarts for r in view.ranks),
            rank_seconds=usage.get("rankSeconds", 0.0),
            gpu_seconds=usage.get("gpuSeconds", 0.0),
        )

    def refresh(self) -> "DistributedTraining":
        self._client._blocking.run(flows.fetch(self._run))
        return self

    async def refresh_async(self) -> "DistributedTraining":
        await self._client._async.run(flows.fetch(self._run))
        return self

    # ---- details -----------------------------------------------------------------------------------------------------

    def why(self) -> str:
        """One sentence: what the run is waiting for, or how it ended."""
        return self._client._blocking.run(flows.why(self._run))

    async def why_async(self) -> str:
        return await self._client._async.run(flows.why(self._run))

    def events(self, since: int = 0, limit: int | None = None) -> list[Event]:
        """Return the events, newest first. `since`: only those after that version of the run."""
        return self._client._blocking.run(flows.events(self._run, since, limit))

    async def events_async(self, since: int = 0, limit: int | None = None) -> list[Event]:
        return await self._client._async.run(flows.events(self._run, since, limit))

    def series(
        self,
        metric: str | None = None,
        rank: int | None = None,
        *,
        points: int | None = None,
        since: float | None = None,
    ) -> list[Series]:
        """Return the reports of ranks over time. A long series has `points` points, with mean, minimum and maximum."""
        return self._client._blocking.run(flows.series(self._run, metric, rank, points, since))

    async def series_async(
        self,
        metric: str | None = None,
        rank: int | None = None,
        *,
        points: int | None = None,
        since: float | None = None,
    ) -> list[Series]:
        return await self._client._async.run(flows.series(self._run, metric, rank, points, since))

    def checkpoints(self) -> list[Checkpoint] | None:
        """Return the snapshots that `basilica.Progress` keeps, newest step first; None if the server cannot read them,
        as on Kubernetes."""
        return self._client._blocking.run(flows.checkpoints(self._run))

    async def checkpoints_async(self) -> list[Checkpoint] | None:
        return await self._client._async.run(flows.checkpoints(self._run))

    def logs(self, rank: int | None = None, tail: int | None = None, follow: bool = False) -> str:
        """Return the output of ranks. With `follow`, up to the run's end; `stream_logs` yields lines as they come."""
        if follow:
            return "".join(_line(rank, *entry) for entry in self.stream_logs(_ranks(rank), tail=tail))
        return self._client._blocking.run(flows.logs(self._run, _ranks(rank), tail))

    async def logs_async(self, rank: int | None = None, tail: int | None = None, follow: bool = False) -> str:
        if follow:
            return "".join([_line(rank, *e) async for e in self.stream_logs_async(_ranks(rank), tail=tail)])
        return await self._client._async.run(flows.logs(self._run, _ranks(rank), tail))

    def stream_logs(
        self, ranks: Sequence[int] | None = None, *, tail: int | None = None, follow: bool = True
    ) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) as they are written, until the run has ended. A dropped connection is resumed."""
        return self._client._blocking.iterate(flows.stream_logs(self._run, ranks, tail, follow=follow))

    def stream_logs_async(
        self, ranks: Sequence[int] | None = None, *, tail: int | None = None, follow: bool = True
    ) -> AsyncGenerator[tuple[int, str], None]:
        return self._client._async.iterate(flows.stream_logs(self._run, ranks, tail, follow=follow))

    def changes(self, *, reports: bool = False) -> Iterator[RunView | NoAnswer]:
        """Yield the run as it is, and again after each change, until it is settled.

        With `reports`, also while ranks report, about once a second. A `NoAnswer` in between: the server is silent, and
        the request is retried.
        """
        return self._client._blocking.iterate(flows.changes(self._run, reports=reports))

    def changes_async(self, *, reports: bool = False) -> AsyncGenerator[RunView | NoAnswer, None]:
        return self._client._async.iterate(flows.changes(self._run, reports=reports))

    # ---- operations --------------------------------------------------------------------------------------------------

    def scale(self, target: int) -> WorldStatus:
        """Request this many ranks. Returns the world with the new target; `wait_until_target_world` waits for it."""
        return self._client._blocking.run(flows.scale(self._run, target))

    async def scale_async(self, target: int) -> WorldStatus:
        return await self._client._async.run(flows.scale(self._run, target))

    def cancel(self) -> None:
        """End the run and keep its record. An ended run is not changed."""
        self._client._blocking.run(flows.cancel(self._run))

    async def cancel_async(self) -> None:
        await self._client._async.run(flows.cancel(self._run))

    def delete(self) -> None:
        """End the run and remove its record, logs and checkpoints. A run that is gone already is no error."""
        self._client._blocking.run(flows.delete(self._run, DELETE_SECONDS))

    async def delete_async(self) -> None:
        await self._client._async.run(flows.delete(self._run, DELETE_SECONDS))

    def execute(self, command: Sequence[str], rank: int = 0) -> Iterator[tuple[str, str] | int]:
        """Run a command beside a rank, with its environment and directory. Yields the output as ("stdout" or "stderr",
        text), then the exit code. A caller that stops reading ends the command."""
        return self._client._blocking.iterate(flows.execute(self._run, command, rank))

    def execute_async(self, command: Sequence[str], rank: int = 0) -> AsyncGenerator[tuple[str, str] | int, None]:
        return self._client._async.iterate(flows.execute(self._run, command, rank))

    def rerun(self, *, resume: bool = False) -> "DistributedTraining":
        """Start a new run with the same spec. With `resume`, it goes on from the progress of this one, which has to
        have ended."""
        again = Remembered(self.name)
        self._client._blocking.run(flows.rerun(again, resume=resume))
        return DistributedTraining(self._client, again.name, _run=again)

    async def rerun_async(self, *, resume: bool = False) -> "DistributedTraining":
        again = Remembered(self.name)
        await self._client._async.run(flows.rerun(again, resume=resume))
        return DistributedTraining(self._client, again.name, _run=again)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait_until_min_world(self, timeout: float = 300) -> WorldStatus:
        """Wait until at least `min` ranks are up (or the run has succeeded)."""
        return self._client._blocking.run(flows.wait(self._run, waits.min_world, timeout)).world

    async def wait_until_min_world_async(self, timeout: float = 300) -> WorldStatus:
        return (await self._client._async.run(flows.wait(self._run, waits.min_world, timeout))).world

    def wait_until_target_world(self, timeout: float = 600) -> WorldStatus:
        """Wait until the target that was last requested, by any client, is up and no rank above it runs."""
        return self._client._blocking.run(flows.wait(self._run, waits.target_world, timeout)).world

    async def wait_until_target_world_async(self, timeout: float = 600) -> WorldStatus:
        return (await self._client._async.run(flows.wait(self._run, waits.target_world, timeout))).world

    def wait_until_complete(self, timeout: float = 1800) -> WorldStatus:
        """Wait until the run has succeeded; `UDTerminalState` if it was over already. `join()` accepts that too."""
        return self._client._blocking.run(flows.wait_complete(self._run, timeout)).world

    async def wait_until_complete_async(self, timeout: float = 1800) -> WorldStatus:
        return (await self._client._async.run(flows.wait_complete(self._run, timeout))).world

    def wait_until_bench_complete(self, timeout: float = 1500) -> BenchStatus | None:
        """Wait until the probe has ended; None with the bench off."""
        return self._client._blocking.run(flows.wait_bench(self._run, timeout))

    async def wait_until_bench_complete_async(self, timeout: float = 1500) -> BenchStatus | None:
        return await self._client._async.run(flows.wait_bench(self._run, timeout))

    def join(self, timeout: float | None = None) -> WorldStatus:
        """Return the final world of a run that succeeds or has succeeded; else raise an exception with its end."""
        return self._client._blocking.run(flows.wait(self._run, waits.complete, timeout)).world

    async def join_async(self, timeout: float | None = None) -> WorldStatus:
        return (await self._client._async.run(flows.wait(self._run, waits.complete, timeout))).world

    def results(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the results of the shipped function by rank, once the run has succeeded.

        The place of an unusable result (half-written, or too large) has a `DistributedError` with the reason; the
        others are there.
        """
        return self._client._blocking.run(flows.results(self._run, timeout))

    async def results_async(self, timeout: float | None = None) -> dict[int, Any]:
        return await self._client._async.run(flows.results(self._run, timeout))

    # ---- as a context manager ----------------------------------------------------------------------------------------

    def __enter__(self) -> "DistributedTraining":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._blocking.run(flows.leave(self._run, DELETE_SECONDS, remove=self.delete_on_exit))

    async def __aenter__(self) -> "DistributedTraining":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client._async.run(flows.leave(self._run, DELETE_SECONDS, remove=self.delete_on_exit))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the requested target: a copy, here or in another process, fetches the state itself."""
        return _handle, (self._client, self.name, self.delete_on_exit, self._run.requested_target)

    def __repr__(self) -> str:
        view = self._run.view
        if view is None:
            return f"<DistributedTraining {self._run.name}>"
        return f"<DistributedTraining {view.instance} {view.phase} {view.world.ready}/{view.world.target}>"

    def _repr_html_(self) -> str:
        """Return the static table, for notebooks that cannot keep it current."""
        return table(self.refresh()._view)

    def _ipython_display_(self) -> None:
        """Display the live table, by connections of its own, until the run has ended."""
        name = self.refresh().name

        def changes() -> Iterator[RunView | NoAnswer]:
            with self._client._copy() as client:
                yield from DistributedTraining(client, name).changes()

        self._shown = show_live(self._view, changes())


def _handle(
    client: "BasilicaClient", name: str, delete_on_exit: bool, requested_target: int | None
) -> DistributedTraining:
    run = Remembered(name, requested_target=requested_target)
    return DistributedTraining(client, name, delete_on_exit=delete_on_exit, _run=run)


def _ranks(rank: int | None) -> list[int] | None:
    return None if rank is None else [rank]


def _line(only: int | None, rank: int, line: str) -> str:
    return f"{line}\n" if only is not None else f"{rank}| {line}\n"
