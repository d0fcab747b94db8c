"""The Kubernetes runtime: ranks as pods of an Indexed Job, driven through their run's keyspace."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from basilica.core.actions import Launch, Probe, Stop
from basilica.core.errors import RuntimeUnavailable
from basilica.core.mesh import Announcement
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.core.seen import Ended, SeenBench, SeenRank, Sight, Sighting
from basilica.core.spec import Wanted
from basilica.kube.api import KubeApi
from basilica.kube.run import Settings
from basilica.ports import Exited, InUse, LogChunk, Output, Run, StoredArchive
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.orders import Order
from basilica.report_series import series_of
from basilica.runtimes.kubernetes import logs
from basilica.runtimes.kubernetes.bench import see_bench
from basilica.runtimes.kubernetes.cluster import Cluster
from basilica.runtimes.kubernetes.execute import execute_beside
from basilica.runtimes.kubernetes.keeping import Keeping, Kept, Telling
from basilica.runtimes.kubernetes.keyspace import NOT_STARTED, RunKeys
from basilica.runtimes.kubernetes.mesh import see_mesh
from basilica.runtimes.kubernetes.node_evidence import Evidence
from basilica.runtimes.kubernetes.parse import Gang, PodFacts
from basilica.runtimes.kubernetes.reports import SeriesReader, parse_reports, parse_series, series_to_keep
from basilica.runtimes.kubernetes.tidying import Patience, Tidying
from basilica.runtimes.kubernetes.wakes import Tally, Wakes

log = logging.getLogger(__name__)

MESH_LIMIT_S = 30.0
LEAVE_WITHIN_S = 5.0
READ_WITHIN_S, READ_FOR_S = 2.0, 60.0


class KubernetesRuntime:
    """Ranks on a cluster. Nothing that matters is remembered here: the cluster and the keyspaces have it all."""

    name = "kubernetes"
    runs_images = True

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        *,
        patience: Patience | None = None,
        mesh_limit_seconds: float = MESH_LIMIT_S,
    ) -> None:
        self._api, self._patience, self._mesh_limit = api, patience or Patience(), mesh_limit_seconds
        self._queue, self._node_seconds, self._times = settings.queue, settings.node_seconds, settings.fence
        self._cluster = Cluster(api, settings, self._changed)
        self._keeping, self._series = Keeping(api, self._cluster.objects), SeriesReader()
        self._keys: dict[str, RunKeys] = {}
        self._buried: dict[str, dict[tuple[int, int], Ended]] = {}  # stopped before anything was made for the run
        self._tidying = Tidying(self._cluster, self._patience, self._spawn, settings.queue)
        self._readers: dict[str, set[asyncio.Event]] = {}
        self._wakes: Wakes | None = None
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._driven: dict[str, tuple[int, int]] = {}  # runs that a controller looks at here: their min and target
        self._tasks: set[asyncio.Task[object]] = set()

    # ------------------------------------------------------------------------------------------------ begin and end

    async def start(self, wake: Callable[[str], None]) -> None:
        self._wakes = Wakes(wake, self._tally)
        await self._cluster.start()

    async def close(self) -> None:
        if self._wakes is not None:
            self._wakes.close()
        self._wakes = None
        for alarm in self._alarms.values():
            alarm.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for keys in self._keys.values():
            await keys.close()
        self._keys.clear()
        await self._cluster.close()
        await self._api.close()

    def _changed(self, instance: str) -> None:
        for event in self._readers.get(instance, ()):
            event.set()
        if self._wakes is not None:
            self._wakes.changed(instance)

    def _tally(self, instance: str) -> Tally:
        keys = self._keys.get(instance)
        return Tally() if keys is None else keys.tally(self._driven.get(instance, ()))

    def _spawn(self, instance: str, work: Coroutine[Any, Any, object]) -> None:
        """Do something in the background; what cannot be done now is asked for again by the next look."""

        async def do() -> None:
            try:
                await work
            except RuntimeUnavailable as problem:
                log.warning("%s: %s", instance, problem)
            self._changed(instance)

        task = asyncio.get_running_loop().create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --------------------------------------------------------------------------------------------------------- look

    async def observe(self, run: Run) -> Sighting:
        self._check()
        self._driven[run.instance] = (run.spec.world.min, run.spec.world.target)
        keys = await self._keys_of(run)
        gang = self._gang(run, keys)
        if keys is not None and any(_is_unaccounted(pod, keys, gang.evidence) for pod in gang.pods):
            if run.spec.wanted is not Wanted.RUN and keys.silent_for >= self._patience.keyspace_seconds:
                await self._cluster.close_job(run)
            raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer, and only it knows its ranks")
        now = time.time()
        ranks = (*gang.see(now), *self._never_launched(run))
        due = self._tidying.tidy(run, gang, ranks, keys, now)
        lost_in = gang.lost_in()
        lost_at = None if lost_in is None else now + lost_in
        self._look_again_at(run, min((at for at in (lost_at, due) if at is not None), default=None), now)
        return Sighting(
            ranks=ranks,
            bench=None if run.spec.bench is None else self._bench(run),
            rendezvous=None if keys is None else keys.seen(),
            mesh=None if keys is None else see_mesh(gang.pods, run.spec.world, keys.failing, self._mesh_limit),
            warnings=self._tidying.warnings(run.instance),
        )

    def _check(self) -> None:
        if self._wakes is None:
            raise RuntimeUnavailable("the Kubernetes runtime is not running")
        self._cluster.check()

    def _gang(self, run: Run, keys: RunKeys | None) -> Gang:
        records = {} if keys is None else keys.records
        named = {record.pod for record in records.values() if record.ended is None}
        return Gang(
            orders={} if keys is None else keys.orders,
            records=records,
            pods=tuple(self._cluster.pods(run.instance)),
            evidence=self._evidence(run, keys),
            gone=self._cluster.gone(run.instance, named),
            gpus=run.spec.resources.gpus.count,
            waiting_for=self._waiting_for(run),
        )

    def _evidence(self, run: Run, keys: RunKeys | None) -> Evidence:
        now, nodes = time.monotonic(), self._cluster.nodes
        silences: dict[str, float | None] = {}
        missed: dict[str, float] = {}
        if keys is not None:
            pods = {pod.uid for pod in self._cluster.pods(run.instance)}
            pods |= {record.pod for record in keys.records.values() if record.ended is None}
            silences = {pod: keys.listening.silence(pod, now) for pod in pods}
            shown = {pod: keys.listening.missed(pod, now) for pod in pods}
            missed = {pod: silence for pod, silence in shown.items() if silence is not None}
        return Evidence(
            now=now,
            nodes=nodes.facts,
            counted_from=nodes.counted_from,
            patience=self._node_seconds,
            lost_after=self._times.lost_after,
            silences=silences,
            missed=missed,
            settles_in=0.0 if keys is None else keys.listening.settles_in(now),
        )

    def _waiting_for(self, run: Run) -> str:
        """What ranks wait for that have no pod."""
        if self._queue is not None:
            return f"a pod: it is in queue {self._queue}"
        complaint = self._cluster.complaint(run.instance)
        return f"a pod, which Kubernetes refuses: {complaint}" if complaint else "a pod"

    async def _keys_of(self, run: Run) -> RunKeys | None:
        """The keyspace of the run, if it has one; that of another address is not its own any more."""
        endpoint = self._cluster.endpoint(run)
        known = self._keys.get(run.instance)
        if known is not None and known.endpoint != endpoint:
            del self._keys[run.instance]
            await known.close()
            known = None
        if known is None and endpoint is not None:
            known = self._keys[run.instance] = RunKeys(
                endpoint, run.instance, lambda: self._changed(run.instance), self._times
            )
        return known

    def _never_launched(self, run: Run) -> list[SeenRank]:
        buried = self._buried.get(run.instance, {})
        return [
            SeenRank(rank=rank, attempt=attempt, sight=Sight.ENDED, ended=ended)
            for (rank, attempt), ended in buried.items()
        ]

    def _look_again_at(self, run: Run, moment: float | None, now: float) -> None:
        """Nobody tells that a node is still silent."""
        alarm = self._alarms.pop(run.instance, None)
        if alarm is not None:
            alarm.cancel()
        if moment is not None and moment > now:
            loop = asyncio.get_running_loop()
            self._alarms[run.instance] = loop.call_later(moment - now + 0.05, self._changed, run.instance)

    # ----------------------------------------------------------------------------------------------- launch and stop

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        self._check()
        buried = self._buried.get(run.instance, {})
        wanted = [launch for launch in launches if (launch.rank, launch.attempt) not in buried]
        if not wanted:
            return
        await self._cluster.make(run, max(max(launch.world_size, launch.rank + 1) for launch in wanted))
        keys = await self._keys_of(run)
        if keys is None:
            raise RuntimeUnavailable(f"the rendezvous of {run.instance} is not there yet")
        gang = self._gang(run, keys)
        busy = {seen.rank: seen.attempt for seen in gang.see(time.time()) if seen.sight is not Sight.ENDED}
        free = [launch for launch in wanted if busy.get(launch.rank, launch.attempt) >= launch.attempt]
        keys.launch({each.rank: Order(attempt=each.attempt, run=True, world=each.world_size) for each in free})
        self._changed(run.instance)

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        self._check()
        keys = await self._keys_of(run)
        if keys is None and self._cluster.job(run) is None:
            for stop in stops:
                never = Ended(exit_code=None, reason=NOT_STARTED, finished_at=time.time(), stopped=True)
                self._buried.setdefault(run.instance, {})[stop.rank, stop.attempt] = never
            self._changed(run.instance)
            return
        if keys is None:
            await self._cluster.close_job(run)  # without a rendezvous there is no other way
            return
        try:
            await keys.stop({stop.rank: self._stop_order(run, stop) for stop in stops})
        except RuntimeUnavailable:
            if run.spec.wanted is Wanted.RUN or keys.silent_for < self._patience.keyspace_seconds:
                raise
            await self._cluster.close_job(run)

    def _stop_order(self, run: Run, stop: Stop) -> Order:
        """A rank that is not wanted any more leaves, so that its container ends by itself and keeps its log."""
        leave = stop.rank >= run.spec.world.target or run.spec.wanted is not Wanted.RUN
        return Order(attempt=stop.attempt, run=False, grace=stop.grace_seconds, leave=leave)

    # --------------------------------------------------------------------------------------------------- rendezvous

    async def announce(self, run: Run, announcement: Announcement) -> None:
        """What cannot be said yet, since the rendezvous has only begun to start, is missed by the next look."""
        self._check()
        if self._cluster.endpoint(run) is None:
            await self._cluster.make_rendezvous(run)
        keys = await self._keys_of(run)
        if keys is None or not keys.known:
            return
        await keys.announce(announcement, drives_torch=run.spec.rendezvous_backend == "etcd-v2")

    async def end_rendezvous(self, run: Run) -> None:
        """Have the containers end, keep what they gave, close the Job, and take the rendezvous down last of all."""
        self._check()
        keys = await self._keys_of(run)
        if keys is not None and 0.0 < keys.silent_for < self._patience.keyspace_seconds:
            raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer, and has what is to be kept")
        if keys is not None and keys.silent_for == 0.0:
            await self._keeping.keep(run, await keys.results(), await self._told(run, keys))
            living = {pod.rank for pod in self._cluster.pods(run.instance) if not pod.over}
            await keys.dismiss(sorted(living))
            await self._until_gone(run)
        await self._cluster.close_job(run)
        await self._cluster.end_rendezvous(run)
        if keys is not None:
            self._keys.pop(run.instance, None)
            await keys.close()

    async def _until_gone(self, run: Run) -> None:
        changed = self._listen(run.instance)
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                while any(pod.deletable for pod in self._cluster.pods(run.instance)):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            log.warning("%s: not all containers ended by themselves", run.instance)
        finally:
            self._unlisten(run.instance, changed)

    async def remove(self, run: Run) -> None:
        self._check()
        keys = self._keys.pop(run.instance, None)
        if keys is not None:
            await keys.close()
        await self._cluster.remove(run)
        self._buried.pop(run.instance, None)
        self._driven.pop(run.instance, None)
        self._tidying.forget(run.instance)
        self._keeping.forget(run.instance)
        if self._wakes is not None:
            self._wakes.forget(run.instance)

    # --------------------------------------------------------------------------------------------------------- logs

    def _pods_of_rank(self, run: Run, rank: int) -> list[PodFacts]:
        found = [pod for pod in self._cluster.pods(run.instance) if pod.rank == rank]
        return sorted(found, key=lambda pod: (pod.created, pod.name))

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        return await logs.tail(self._api, run.namespace, rank, self._pods_of_rank(run, rank), lines)

    async def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        changed = self._listen(run.instance)
        try:
            follower = logs.Follower(self._api, run.namespace, rank, lambda: self._pods_of_rank(run, rank), changed)
            async with aclosing(follower.follow(cursor)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._unlisten(run.instance, changed)

    def _listen(self, instance: str) -> asyncio.Event:
        changed = asyncio.Event()
        self._readers.setdefault(instance, set()).add(changed)
        return changed

    def _unlisten(self, instance: str, changed: asyncio.Event) -> None:
        readers = self._readers.get(instance, set())
        readers.discard(changed)
        if not readers:
            self._readers.pop(instance, None)

    # ------------------------------------------------------------------------------------------- reports and results

    async def _keys_to_read(self, run: Run) -> RunKeys | None:
        """The keyspace, for who only reads: it is let go of after a while, unless the run is driven from here."""
        keys = await self._keys_of(run)
        if keys is None:
            return None
        loop = asyncio.get_running_loop()
        if run.instance not in self._alarms and run.instance not in self._driven:
            self._alarms[run.instance] = loop.call_later(READ_FOR_S, self._stop_reading, run.instance)
        changed = self._listen(run.instance)
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                while not keys.known:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return None
        finally:
            self._unlisten(run.instance, changed)
        return keys

    def _stop_reading(self, instance: str) -> None:
        self._alarms.pop(instance, None)
        keys = self._keys.pop(instance, None) if instance not in self._driven else None
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
                kept = await self._kept(run)  # it may be just ending
                if not kept.data:
                    raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer: {error}") from error
        else:
            kept = await self._kept(run)
        return await asyncio.to_thread(lambda: series_of(kept.series().items(), query))

    async def _kept(self, run: Run) -> Kept:
        return await self._keeping.kept(run, for_good=self._cluster.endpoint(run) is None)

    async def _told(self, run: Run, keys: RunKeys) -> Telling:
        """What is to be kept of it. Series that cannot be read from a keyspace that answers are no reason to stay."""
        try:
            texts = await self._series.read(run, keys.endpoint)
        except NoAnswer as error:
            if keys.silent_for > 0.0:
                raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer: {error}") from error
            log.warning("%s: the series of its ranks cannot be read, and are not kept: %s", run.instance, error)
            texts = {}
        return Telling(keys.reports(), await asyncio.to_thread(series_to_keep, texts))

    async def next_report(self, run: Run, after: float) -> None:
        changed = self._listen(run.instance)
        try:
            while not any(report.at > after for report in (await self.reports(run)).values()):
                await changed.wait()
                changed.clear()
        finally:
            self._unlisten(run.instance, changed)

    async def results(self, run: Run) -> dict[int, bytes]:
        keys = await self._keys_to_read(run)
        if keys is not None:
            with contextlib.suppress(RuntimeUnavailable):  # it may end just now
                return await keys.results()
        return (await self._kept(run)).results(run.instance)

    # -------------------------------------------------------------------------------------------------------- bench

    async def probe(self, run: Run, probe: Probe) -> None:
        """On the nodes of the first two ranks."""
        self._check()
        keys = await self._keys_of(run)
        if keys is not None and self._cluster.bench(run)[0] is None:
            nodes = [pod.node for rank in range(2) for pod in self._pods_of_rank(run, rank)[-1:] if pod.node]
            strict = probe.placement == "strict"
            await self._cluster.make_bench(run, list(dict.fromkeys(nodes)), keys.endpoint, strict=strict)

    async def end_probe(self, run: Run) -> None:
        self._check()
        await self._cluster.end_bench(run)

    def _bench(self, run: Run) -> SeenBench | None:
        job, pods = self._cluster.bench(run)
        return None if job is None else see_bench(tuple(pods), {pod.node for pod in self._cluster.pods(run.instance)})

    # ----------------------------------------------------------------------------------------------------- commands

    async def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        self._check()
        pods = self._pods_of_rank(run, rank)
        async with aclosing(execute_beside(self._api, run, rank, pods, argv)) as output:
            async for chunk in output:
                yield chunk

    # ----------------------------------------------------------------------------------------------------- archives

    async def store_archive(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        return await self._cluster.archives.store(user, chunks)

    async def has_archive(self, user: str, digest: str) -> bool:
        return await self._cluster.archives.has(user, digest)

    async def forget_archives(self, in_use: InUse, before: float) -> list[str]:
        return await self._cluster.archives.forget(in_use, before)


def _is_unaccounted(pod: PodFacts, keys: RunKeys, evidence: Evidence) -> bool:
    """Something may run there, and which attempt of the rank it is only its agent can tell.

    A rendezvous that has lost its keys is told again by every agent that is there.
    """
    if pod.state != "running" or pod.rank in keys.orders or any(each.pod == pod.uid for each in keys.records.values()):
        return False
    return not keys.known or not (evidence.is_heard(pod.uid) or evidence.is_silent(pod.uid))
