"""The Kubernetes runtime: ranks as pods of our own, driven through their run's keyspace."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from basilica.core.actions import Launch, Probe, Stop
from basilica.core.checkpoints import Checkpoint
from basilica.core.errors import RuntimeUnavailable
from basilica.core.mesh import Announcement
from basilica.core.policy import name_ranks
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.core.seen import Ended, SeenBench, SeenRank, Sight, Sighting
from basilica.core.spec import Wanted
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.run import Settings
from basilica.ports import Exited, InUse, LogChunk, Output, Run, StoredArchive
from basilica.rendezvous.orders import Order
from basilica.runtimes.kubernetes import logs
from basilica.runtimes.kubernetes.bench import see_bench
from basilica.runtimes.kubernetes.cluster import Cluster, Keeper
from basilica.runtimes.kubernetes.execute import execute_beside
from basilica.runtimes.kubernetes.kept_results import KeptResults
from basilica.runtimes.kubernetes.keyspace import NOT_STARTED, RunKeys
from basilica.runtimes.kubernetes.mesh import see_mesh
from basilica.runtimes.kubernetes.node_evidence import Evidence
from basilica.runtimes.kubernetes.parse import Gang, PodFacts, by_age
from basilica.runtimes.kubernetes.pod_actions import PodActions
from basilica.runtimes.kubernetes.pod_groups import pods_to_close
from basilica.runtimes.kubernetes.pod_plan import Facts, Keyspace, Patience, plan_pods
from basilica.runtimes.kubernetes.run_reader import RunReader
from basilica.runtimes.kubernetes.run_state import RunState, RunStates
from basilica.runtimes.kubernetes.wakes import Tally, Wakes

log = logging.getLogger(__name__)

MESH_LIMIT_S = 30.0
LEAVE_WITHIN_S, MADE_WITHIN_S = 5.0, 30.0
BENCH_PODS = 2


class KubernetesRuntime:
    """The `Runtime` port on a cluster. It keeps no state that matters: the cluster and the keyspaces have it all.

    `drives`: this process drives runs; otherwise it only reads, and may write nothing.
    """

    name = "kubernetes"
    runs_images = True

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        *,
        patience: Patience | None = None,
        mesh_limit_seconds: float = MESH_LIMIT_S,
        drives: bool = True,
    ) -> None:
        self._api, self._patience, self._mesh_limit = api, patience or Patience(), mesh_limit_seconds
        self._queue, self._node_seconds, self._times = settings.queue, settings.node_seconds, settings.fence
        self._drives = drives
        self._states = RunStates()
        self._cluster = Cluster(api, settings, self._changed, self._keeper)
        self._kept_results = KeptResults(api, self._cluster.objects)
        self._reader = RunReader(self._states, self._cluster, self._kept_results, self._keys_of, self._spawn)
        self._actions = PodActions(self._cluster, self._spawn)
        self._wakes: Wakes | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    def _keeper(self, instance: str) -> Keeper:
        if not self._drives:
            return Keeper.NOBODY
        state = self._states.find(instance)
        if state is None or state.marks is None:
            return Keeper.UNKNOWN
        return Keeper.OVER if state.closed else Keeper.PLAN

    # ------------------------------------------------------------------------------------------------ start and close

    async def start(self, wake: Callable[[str], None]) -> None:
        self._wakes = Wakes(wake, self._tally)
        await self._cluster.start()

    async def close(self) -> None:
        if self._wakes is not None:
            self._wakes.close()
        self._wakes = None
        for state in self._states.all():
            state.set_alarm(None)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for state in self._states.all():
            if state.keys is not None:
                await state.keys.close()
        await self._cluster.close()
        await self._api.close()

    def _changed(self, instance: str) -> None:
        self._notify_readers(instance)
        if self._wakes is not None:
            self._wakes.changed(instance)

    def _notify_readers(self, instance: str) -> None:
        state = self._states.find(instance)
        if state is not None:
            state.notify_readers()

    def _tally(self, instance: str) -> Tally:
        state = self._states.find(instance)
        return Tally() if state is None or state.keys is None else state.keys.tally(state.marks or ())

    def _spawn(self, instance: str, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` in the background; an action that fails now is planned again by the next look."""

        async def do() -> None:
            try:
                await work
            except RuntimeUnavailable as problem:
                log.warning("%s: %s", instance, problem)
            self._changed(instance)

        task = asyncio.get_running_loop().create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------------------ observe

    async def observe(self, run: Run) -> Sighting:
        self._check()
        state = self._states.of(run.instance)
        state.marks = (run.spec.world.min, run.spec.world.target)
        keys = await self._keys_of(run)
        if keys is not None:
            keys.activities.fresh_steps = run.fresh_steps
        now = time.time()
        gang = self._gang(run, keys, now)
        unaccounted = [] if keys is None else [pod for pod in gang.pods if _is_unaccounted(pod, keys, gang.evidence)]
        if keys is not None and unaccounted:
            self._observe_again_at(run, _first(now, (gang.evidence.silent_in(pod.uid) for pod in unaccounted)), now)
            if run.spec.wanted is not Wanted.RUN and keys.silent_for >= self._patience.keyspace_seconds:
                await self._cluster.end_pods(run)
            raise RuntimeUnavailable(_why_undecided(run, keys, unaccounted))
        ranks = (*gang.see(now), *self._never_launched(run))
        due = self._drive_pods(run, state, gang, ranks, now)
        dues = (gang.lost_in(), None if keys is None else keys.shown_in(), None if due is None else due - now)
        self._observe_again_at(run, _first(now, dues), now)
        return Sighting(
            ranks=ranks,
            bench=None if run.spec.bench is None else self._bench(run),
            rendezvous=None if keys is None else keys.seen(now),
            mesh=None if keys is None else see_mesh(gang.pods, run.spec.world, keys.failing, self._mesh_limit),
            warnings=state.ledger.warnings,
            nodes_lost=gang.nodes_lost(),
        )

    def _drive_pods(self, run: Run, state: RunState, gang: Gang, ranks: Sequence[SeenRank], now: float) -> float | None:
        """Start the actions that are due for the run's pods; return when to look again if nothing changes."""
        if state.closed:
            return None
        silent = 0.0 if state.keys is None else state.keys.silent_for
        facts = Facts(
            instance=run.instance,
            gang=gang,
            ranks=ranks,
            world=run.spec.world,
            wanted=run.spec.wanted,
            keyspace=self._keyspace(state.keys),
            now=now,
            lost=run.lost,
            creating=state.creating,
            queued=self._queue is not None,
            patience=self._patience,
            pause=random.uniform(0.5, 1.0) * self._patience.back_off_seconds,
            gives_up_at=now + self._patience.keyspace_seconds - silent,
            rendezvous_has_pod=self._keyspace(state.keys) is Keyspace.ANSWERS or self._cluster.has_rendezvous_pod(run),
        )
        plan = plan_pods(facts, state.ledger)
        state.ledger = plan.ledger
        self._actions.carry_out(run, state, plan)
        return plan.due_at

    def _keyspace(self, keys: RunKeys | None) -> Keyspace:
        if keys is None:
            return Keyspace.NONE
        if keys.silent_for == 0.0:
            return Keyspace.ANSWERS
        return Keyspace.SILENT if keys.silent_for < self._patience.keyspace_seconds else Keyspace.GIVEN_UP

    def _check(self) -> None:
        if self._wakes is None:
            raise RuntimeUnavailable("the Kubernetes runtime is not running")
        self._cluster.check()

    def _gang(self, run: Run, keys: RunKeys | None, now: float) -> Gang:
        ledger = self._states.of(run.instance).ledger
        records = {} if keys is None else keys.records
        named = {record.pod for record in records.values() if record.ended is None}
        return Gang(
            orders={} if keys is None else keys.orders,
            records=records,
            activities={} if keys is None else keys.activities.by_attempt,
            pods=tuple(self._cluster.pods(run.instance)),
            evidence=self._evidence(run, keys),
            gone=self._cluster.gone(run.instance, named),
            gpus=run.spec.resources.gpus.count,
            waiting_for=ledger.waiting_for(),
            held_back=ledger.held_back(now),
            queue=self._queue,
        )

    def _evidence(self, run: Run, keys: RunKeys | None) -> Evidence:
        now, nodes = time.monotonic(), self._cluster.nodes
        silences: dict[str, float | None] = {}
        missed: dict[str, float] = {}
        if keys is not None:
            pods = {pod.uid for pod in self._cluster.pods(run.instance)}
            pods |= {record.pod for record in keys.records.values() if record.ended is None}
            silences = {pod: keys.heartbeats.silence(pod, now) for pod in pods}
            shown = {pod: keys.heartbeats.missed(pod, now) for pod in pods}
            missed = {pod: silence for pod, silence in shown.items() if silence is not None}
        return Evidence(
            now=now,
            nodes=nodes.facts,
            counted_from=nodes.counted_from,
            patience=self._node_seconds,
            lost_after=self._times.lost_after,
            silences=silences,
            missed=missed,
            settles_in=0.0 if keys is None else keys.heartbeats.settles_in(now),
        )

    async def _keys_of(self, run: Run) -> RunKeys | None:
        """Return the keyspace of the run, if it has one; a keyspace at a former address is closed."""
        endpoint, state = self._cluster.endpoint(run), self._states.of(run.instance)
        known = state.keys
        if known is not None and known.endpoint != endpoint:
            state.keys = None
            await known.close()
        if state.keys is None and endpoint is not None:
            state.keys = RunKeys(
                endpoint,
                run.instance,
                lambda: self._changed(run.instance),
                lambda: self._notify_readers(run.instance),
                self._times,
            )
        return state.keys

    def _never_launched(self, run: Run) -> list[SeenRank]:
        return [
            SeenRank(rank=rank, attempt=attempt, sight=Sight.ENDED, ended=ended)
            for (rank, attempt), ended in self._states.of(run.instance).buried.items()
        ]

    def _observe_again_at(self, run: Run, moment: float | None, now: float) -> None:
        """Set a timer for the next look: no event reports that a node is still silent, or that a pause is over."""
        alarm = None
        if moment is not None and moment > now:
            loop = asyncio.get_running_loop()
            alarm = loop.call_later(moment - now + 0.05, self._changed, run.instance)
        self._states.of(run.instance).set_alarm(alarm)

    # ----------------------------------------------------------------------------------------------- launch and stop

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        """Write the orders for these launches to the keyspace. The next look creates pods for them."""
        self._check()
        state = self._states.of(run.instance)
        wanted = [launch for launch in launches if (launch.rank, launch.attempt) not in state.buried]
        if not wanted or (state.ledger.terminating and self._cluster.endpoint(run) is None):
            return
        if self._cluster.endpoint(run) is None or not (state.made or self._cluster.pods(run.instance)):
            await self._cluster.make_rendezvous(run)
            state.made = True
        keys = await self._keys_of(run)
        if keys is None:
            raise RuntimeUnavailable(f"the rendezvous of {run.instance} is not there yet")
        now = time.time()
        alive = self._gang(run, keys, now).see(now)
        busy = {seen.rank: seen.attempt for seen in alive if seen.sight is not Sight.ENDED}
        free = [launch for launch in wanted if busy.get(launch.rank, launch.attempt) >= launch.attempt]
        keys.launch({each.rank: Order(attempt=each.attempt, run=True, world=each.world_size) for each in free})
        self._changed(run.instance)

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        self._check()
        keys = await self._keys_of(run)
        if keys is None and not self._is_served(run, stops):
            self._bury(run, stops)
            return
        if keys is None:
            await self._cluster.end_pods(run)  # without a rendezvous there is no other way
            return
        try:
            await keys.stop({stop.rank: self._stop_order(run, stop) for stop in stops})
        except RuntimeUnavailable:
            if run.spec.wanted is Wanted.RUN:
                raise
            if not self._is_served(run, stops):
                self._bury(run, [stop for stop in stops if (stop.rank, stop.attempt) not in keys.records])
            elif keys.silent_for < self._patience.keyspace_seconds:
                raise
            else:
                await self._cluster.end_pods(run)

    def _is_served(self, run: Run, stops: Sequence[Stop]) -> bool:
        """Whether a pod exists, or is being created, that can take up one of the attempts to stop."""
        ranks = {stop.rank for stop in stops}
        living = {pod.rank for pod in self._cluster.pods(run.instance) if not pod.over}
        return bool(ranks & (living | self._states.of(run.instance).creating))

    def _bury(self, run: Run, stops: Sequence[Stop]) -> None:
        """Record the end of attempts that nothing runs or ever will."""
        for stop in stops:
            never = Ended(exit_code=None, reason=NOT_STARTED, finished_at=time.time(), stopped=True)
            self._states.of(run.instance).buried[stop.rank, stop.attempt] = never
        self._changed(run.instance)

    def _stop_order(self, run: Run, stop: Stop) -> Order:
        """Return the stop order for a rank; a rank that is no longer wanted leaves, so that its container ends by
        itself and keeps its log.
        """
        leave = stop.rank >= run.spec.world.target or run.spec.wanted is not Wanted.RUN
        return Order(attempt=stop.attempt, run=False, grace=stop.grace_seconds, leave=leave)

    # --------------------------------------------------------------------------------------------------- rendezvous

    async def announce(self, run: Run, announcement: Announcement) -> None:
        """Publish an announcement. While the rendezvous is still starting, nothing is written: the next look misses the
        announcement and repeats it.
        """
        self._check()
        if self._cluster.endpoint(run) is None and not self._states.of(run.instance).ledger.terminating:
            await self._cluster.make_rendezvous(run)
        keys = await self._keys_of(run)
        if keys is None or not keys.known:
            return
        await keys.announce(announcement, drives_torch=run.spec.rendezvous_backend == "etcd-v2")

    async def end_rendezvous(self, run: Run) -> None:
        """Dismiss the containers, keep their results and reports, end the pods, and delete the rendezvous last of
        all.
        """
        self._check()
        state = self._states.of(run.instance)
        keys = await self._keys_of(run)
        keeps = run.spec.wanted is not Wanted.DELETE and not state.ledger.terminating
        if keys is not None and keeps and self._keyspace(keys) is Keyspace.SILENT:
            raise RuntimeUnavailable(f"the rendezvous of {run.instance} does not answer, and has what is to be kept")
        if keys is not None and self._keyspace(keys) is Keyspace.ANSWERS:
            if keeps:
                await self._kept_results.keep(run, await keys.results(), await self._reader.reported(run, keys))
            living = {pod.rank for pod in self._cluster.pods(run.instance) if not pod.over}
            await keys.dismiss(sorted(living))
            await self._wait_until_gone(run)
        await self._stop_creating(run, state)
        await self._cluster.end_pods(run)
        for pod in pods_to_close(self._cluster.pods(run.instance), lambda _: False):
            await self._cluster.close_group(run, pod)
        await self._cluster.end_rendezvous(run)
        self._cluster.release_held(run)
        if keys is not None:
            state.keys = None
            await keys.close()

    async def _stop_creating(self, run: Run, state: RunState) -> None:
        """Forbid new pods, and wait for those that are being created, since nobody would end them."""
        state.closed = True
        if not await self._states.wait_until(run.instance, lambda: not state.creating, MADE_WITHIN_S):
            raise RuntimeUnavailable(f"pods of {run.instance} are still being made")

    async def _wait_until_gone(self, run: Run) -> None:
        def are_gone() -> bool:
            return not any(pod.deletable for pod in self._cluster.pods(run.instance))

        if not await self._states.wait_until(run.instance, are_gone, LEAVE_WITHIN_S):
            log.warning("%s: not all containers ended by themselves", run.instance)

    async def persist_snapshots(self, run: Run) -> None:
        """Do nothing: the memory of a pod goes with the pod."""

    async def checkpoints(self, run: Run) -> tuple[Checkpoint, ...] | None:
        """Return None: the volumes of ranks are mounted in their pods only."""
        return None

    async def remove(self, run: Run) -> None:
        self._check()
        state = self._states.of(run.instance)
        await self._stop_creating(run, state)
        if state.keys is not None:
            keys, state.keys = state.keys, None
            await keys.close()
        await self._cluster.remove(run)
        await self._actions.release_all(run)
        self._states.forget(run.instance)
        self._kept_results.forget(run.instance)
        if self._wakes is not None:
            self._wakes.forget(run.instance)

    # --------------------------------------------------------------------------------------------------------- logs

    def _pods_of_rank(self, run: Run, rank: int) -> list[PodFacts]:
        found = [pod for pod in self._cluster.pods(run.instance) if pod.rank == rank]
        return sorted(found, key=by_age)

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        return await logs.tail(self._api, run.namespace, rank, self._pods_of_rank(run, rank), lines)

    async def tail_cursor(self, run: Run, rank: int, lines: int) -> str:
        return await logs.tail_cursor(self._api, run.namespace, self._pods_of_rank(run, rank), lines)

    async def read(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        reader = logs.Follower(self._api, run.namespace, rank, lambda: self._pods_of_rank(run, rank), asyncio.Event())
        async with aclosing(reader.read(cursor)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        async with self._states.subscribe(run.instance) as changed:
            follower = logs.Follower(self._api, run.namespace, rank, lambda: self._pods_of_rank(run, rank), changed)
            async with aclosing(follower.follow(cursor)) as chunks:
                async for chunk in chunks:
                    yield chunk

    # ------------------------------------------------------------------------------------------- reports and results

    async def reports(self, run: Run) -> dict[int, Report]:
        return await self._reader.reports(run)

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        return await self._reader.series(run, query)

    async def next_report(self, run: Run, after: float) -> None:
        await self._reader.next_report(run, after)

    async def results(self, run: Run) -> dict[int, bytes]:
        return await self._reader.results(run)

    # -------------------------------------------------------------------------------------------------------- bench

    async def probe(self, run: Run, probe: Probe) -> None:
        """Start the bench probe on the nodes of the first two ranks."""
        self._check()
        keys = await self._keys_of(run)
        if keys is not None and len(self._cluster.bench(run)) < BENCH_PODS:
            nodes = [pod.node for rank in range(2) for pod in self._pods_of_rank(run, rank)[-1:] if pod.node]
            strict = probe.placement == "strict"
            await self._cluster.make_bench(run, list(dict.fromkeys(nodes)), keys.endpoint, strict=strict)

    async def end_probe(self, run: Run) -> None:
        self._check()
        await self._cluster.end_bench(run)

    def _bench(self, run: Run) -> SeenBench | None:
        pods = tuple(self._cluster.bench(run))
        if len(pods) < BENCH_PODS:
            return None
        return see_bench(pods, {pod.node for pod in self._cluster.pods(run.instance)})

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


def _first(now: float, delays: Iterable[float | None]) -> float | None:
    """Return the moment of the shortest of these delays."""
    return min((now + delay for delay in delays if delay is not None), default=None)


def _why_undecided(run: Run, keys: RunKeys, pods: Sequence[PodFacts]) -> str:
    """Return why nothing is decided for the run: some of its pods may run an attempt that no record names."""
    if keys.silent_for > 0.0:
        return f"the rendezvous of {run.instance} does not answer, and only it knows its ranks"
    ranks = name_ranks(pod.rank for pod in pods)
    return f"the rendezvous of {run.instance} has no record of {ranks}, and has not heard from there yet"


def _is_unaccounted(pod: PodFacts, keys: RunKeys, evidence: Evidence) -> bool:
    """Whether the pod may run an attempt that only its agent can name.

    A rendezvous that has lost its keys gets them again from every agent that is there.
    """
    if pod.state != "running" or pod.rank in keys.orders or any(each.pod == pod.uid for each in keys.records.values()):
        return False
    return not keys.known or not (evidence.is_heard(pod.uid) or evidence.is_silent(pod.uid))
