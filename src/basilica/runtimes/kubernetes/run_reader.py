"""Reader of results and reports: from the keyspace of a live run, or from the Secret of one that is over."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from basilica.core.errors import RuntimeUnavailable
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.ports import Run
from basilica.rendezvous.exchange import NoAnswer
from basilica.reports.series import series_of
from basilica.runtimes.kubernetes.cluster import Cluster
from basilica.runtimes.kubernetes.kept_results import Kept, KeptResults, Reported
from basilica.runtimes.kubernetes.keyspace import RunKeys
from basilica.runtimes.kubernetes.reports import SeriesReader, parse_reports, parse_series, series_to_keep
from basilica.runtimes.kubernetes.run_state import RunStates

log = logging.getLogger(__name__)

READ_WITHIN_S, READ_FOR_S = 2.0, 60.0


class RunReader:
    """`keys_of` returns the keyspace of a run, if it has one; `spawn` runs a coroutine in the background."""

    def __init__(
        self,
        states: RunStates,
        cluster: Cluster,
        kept_results: KeptResults,
        keys_of: Callable[[Run], Awaitable[RunKeys | None]],
        spawn: Callable[[str, Coroutine[Any, Any, object]], None],
    ) -> None:
        self._states, self._cluster, self._kept_results = states, cluster, kept_results
        self._keys_of, self._spawn = keys_of, spawn
        self._series = SeriesReader()

    async def _keys_to_read(self, run: Run) -> RunKeys | None:
        """Return the keyspace for a reader; it is closed after a while, unless this process drives the run."""
        keys = await self._keys_of(run)
        if keys is None:
            self._states.forget_idle(run.instance)
            return None
        state, loop = self._states.of(run.instance), asyncio.get_running_loop()
        if state.alarm is None and state.marks is None:
            state.set_alarm(loop.call_later(READ_FOR_S, self._stop_reading, run.instance))
        return keys if await self._states.wait_until(run.instance, lambda: keys.known, READ_WITHIN_S) else None

    def _stop_reading(self, instance: str) -> None:
        state = self._states.find(instance)
        if state is None or state.marks is not None:
            return
        keys, state.keys, state.alarm = state.keys, None, None
        self._states.forget_idle(instance)
        if keys is not None:
            self._spawn(instance, keys.close())

    async def reports(self, run: Run) -> dict[int, Report]:
        keys = await self._keys_to_read(run)
        return (await self._kept(run)).reports() if keys is None else parse_reports(keys.reports())

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        endpoint = self._cluster.endpoint(run)
        if endpoint is not None:
            try:
                texts = await self._series.recent(run, endpoint)
                return await asyncio.to_thread(lambda: series_of(parse_series(texts), query))
            except NoAnswer as error:
                kept = await self._kept(run)  # the run may be just ending
                if not kept.data:
                    raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer: {error}") from error
        else:
            kept = await self._kept(run)
        return await asyncio.to_thread(lambda: series_of(kept.series().items(), query))

    async def _kept(self, run: Run) -> Kept:
        return await self._kept_results.read(run, for_good=self._cluster.endpoint(run) is None)

    async def reported(self, run: Run, keys: RunKeys) -> Reported:
        """Return the reports and series to keep. Series that an answering keyspace cannot deliver do not block the
        run's end.
        """
        try:
            texts = await self._series.read(run, keys.endpoint)
        except NoAnswer as error:
            if keys.silent_for > 0.0:
                raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer: {error}") from error
            log.warning("%s: the series of its ranks cannot be read, and are not kept: %s", run.instance, error)
            texts = {}
        return Reported(keys.reports(), await asyncio.to_thread(series_to_keep, texts))

    async def next_report(self, run: Run, after: float) -> None:
        async with self._states.subscribe(run.instance) as changed:
            while not any(report.at > after for report in (await self.reports(run)).values()):
                await changed.wait()
                changed.clear()

    async def results(self, run: Run) -> dict[int, bytes]:
        keys = await self._keys_to_read(run)
        if keys is not None:
            with contextlib.suppress(RuntimeUnavailable):  # the run may end just now
                return await keys.results()
        return (await self._kept(run)).results(run.instance)
