"""A store in plain dicts, for tests: the same contract, without persistence."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from basilica.core.damage import DamagedRun
from basilica.core.errors import Conflict, DeploymentNotFound, NameInUse, StaleVersion, StoreUnavailable
from basilica.core.events import Event, Reason, RecordedEvent
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.ports import NO_LIMITS, ApiKey, Deployment, Limits, UsageRow
from basilica.stores.bell import Bell
from basilica.stores.rules import (
    EVENTS_KEPT,
    IDEMPOTENCY_SECONDS,
    check_limits,
    is_live,
    is_open,
    usage_of,
)


@dataclass(frozen=True, slots=True)
class _Created:
    """The first request of an idempotency key."""

    instance: str
    spec: DeploymentSpec
    at: float


class MemoryStore:
    """Every write lets other tasks run before it returns, as a real one does.

    `unavailable`: a sentence set by a test, with which all writes fail, and nothing is written.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self.unavailable: str | None = None
        self._now = now
        self._version = 0
        self._deployments: dict[str, Deployment] = {}  # oldest first
        self._events: dict[str, list[RecordedEvent]] = {}  # oldest first
        self._idempotency: dict[tuple[str, str], _Created] = {}
        self._usage: dict[str, UsageRow] = {}  # oldest first
        self._deletions: dict[str, int] = {}
        self._bell = Bell()

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        self._bell.close()

    async def create(
        self,
        deployment: Deployment,
        events: Sequence[Event] = (),
        *,
        idempotency_key: str | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        await self._begin_write()
        now = deployment.status.created_at
        if idempotency_key is not None:
            earlier = self._created_before(deployment, idempotency_key, now)
            if earlier is not None:
                return earlier
        live = [d for d in self._deployments.values() if is_live(d.status)]
        for other in live:
            if (other.namespace, other.spec.name) == (deployment.namespace, deployment.spec.name):
                raise NameInUse(deployment.spec.name, other.instance)
        self._check_limits(deployment.user, limits, new_deployments=1, new_ranks=deployment.spec.world.target)
        if deployment.instance in self._usage:
            raise Conflict(f"the instance name {deployment.instance!r} has been given already")
        if idempotency_key is not None:
            made = _Created(deployment.instance, deployment.spec, now)
            self._idempotency[deployment.user, idempotency_key] = made
        return self._keep(deployment, events, now)

    async def get(self, instance: str) -> Deployment:
        return self._load(instance)

    async def find(self, namespace: str, name: str) -> Deployment:
        mine = [d for d in self._deployments.values() if d.namespace == namespace]
        for found in mine:
            if found.instance == name:
                return found
        for found in reversed(mine):
            if found.spec.name == name:
                return found
        raise DeploymentNotFound(name)

    async def deployments(self, namespace: str | None = None) -> list[Deployment]:
        return [d for d in reversed(self._deployments.values()) if namespace in (None, d.namespace)]

    async def listed(self, namespace: str | None = None) -> list[Deployment | DamagedRun]:
        """Return all runs; none here is ever damaged."""
        return [*await self.deployments(namespace)]

    async def condemn(self, instance: str) -> Deployment:
        return await self.change_spec(instance, lambda deployment: deployment.spec.ended_by(Wanted.DELETE))

    async def live(self) -> list[str]:
        return [d.instance for d in self._deployments.values() if is_open(d.spec, d.status)]

    async def change_spec(
        self,
        instance: str,
        change: Callable[[Deployment], DeploymentSpec],
        events: Sequence[Event] = (),
        *,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        await self._begin_write()
        before = self._load(instance)
        spec = change(before)
        if spec == before.spec:
            return before
        if is_live(before.status):
            more = spec.world.target - before.spec.world.target
            self._check_limits(before.user, limits, new_deployments=0, new_ranks=more)
        return self._keep(replace(before, spec=spec), events, self._now())

    async def save_status(
        self, before: Deployment, status: DeploymentStatus, events: Sequence[Event] = (), *, now: float
    ) -> Deployment:
        await self._begin_write()
        if self._load(before.instance).version != before.version:
            raise StaleVersion(f"{before.instance} has changed since version {before.version}")
        if status == before.status and not events:
            return before
        return self._keep(replace(before, status=status), events, now)

    async def delete(self, instance: str) -> None:
        await self._begin_write()
        if self._deployments.pop(instance, None) is None:
            return
        self._events.pop(instance, None)
        self._idempotency = {key: made for key, made in self._idempotency.items() if made.instance != instance}
        self._version += 1
        self._deletions[instance] = self._version
        self._bell.ring(instance)

    async def prune(self, before: float) -> list[str]:
        ended = [
            (d.status.terminal_at, d.instance)
            for d in self._deployments.values()
            if not is_open(d.spec, d.status) and d.status.terminal_at is not None and d.status.terminal_at < before
        ]
        return [instance for _, instance in sorted(ended)]

    async def events(self, instance: str, *, limit: int | None = None, since: int = 0) -> list[RecordedEvent]:
        found = [e for e in reversed(self._events.get(instance, [])) if e.version > since]
        return found if limit is None else found[: max(limit, 0)]

    async def usage(self, user: str, *, limit: int | None = None, offset: int = 0) -> list[UsageRow]:
        rows = [row for row in reversed(self._usage.values()) if row.user == user][max(offset, 0) :]
        return rows if limit is None else rows[: max(limit, 0)]

    def changes(self, since: int | None = None) -> AsyncGenerator[str, None]:
        if since is None:
            return self._bell.changes(())
        changed = {d.instance: d.version for d in self._deployments.values()} | self._deletions
        return self._bell.changes(i for i, version in sorted(changed.items(), key=_version) if version > since)

    async def wait_change(self, instance: str, version: int, timeout: float | None = None) -> Deployment | None:
        return await self._bell.wait_change(self._load, instance, version, timeout)

    def _load(self, instance: str) -> Deployment:
        try:
            return self._deployments[instance]
        except KeyError:
            raise DeploymentNotFound(instance) from None

    async def _begin_write(self) -> None:
        await asyncio.sleep(0)
        if self.unavailable is not None:
            raise StoreUnavailable(self.unavailable)

    def _keep(self, deployment: Deployment, events: Iterable[Event], now: float) -> Deployment:
        self._version += 1
        deployment = replace(deployment, version=self._version)
        self._deployments[deployment.instance] = deployment
        self._usage[deployment.instance] = usage_of(deployment)
        self._record(deployment, events, now)
        self._bell.ring(deployment.instance)
        return deployment

    def _record(self, deployment: Deployment, events: Iterable[Event], now: float) -> None:
        folded = {(e.reason, e.message): e for e in self._events.get(deployment.instance, [])}
        for event in events:
            earlier = folded.pop((event.reason, event.message), None)
            folded[event.reason, event.message] = RecordedEvent(
                kind=event.kind,
                reason=event.reason,
                message=event.message,
                count=1 if earlier is None else earlier.count + 1,
                first_at=now if earlier is None else earlier.first_at,
                last_at=now if earlier is None else max(now, earlier.last_at),
                version=deployment.version,
            )
        kept = sorted(folded.values(), key=lambda event: event.last_at)  # stable: ties stay in their order
        excess = max(0, len(kept) - EVENTS_KEPT)
        oldest = [event for event in kept if event.reason != Reason.CREATED][:excess]
        self._events[deployment.instance] = [event for event in kept if event not in oldest]

    def _created_before(self, deployment: Deployment, key: str, now: float) -> Deployment | None:
        made = self._idempotency.get((deployment.user, key))
        if made is None or made.at <= now - IDEMPOTENCY_SECONDS:
            return None
        if made.spec != deployment.spec:
            raise Conflict(f"the idempotency key was used for another request already (it made {made.instance})")
        return self._deployments[made.instance]

    def _check_limits(self, user: str, limits: Limits, *, new_deployments: int, new_ranks: int) -> None:
        live = [d for d in self._deployments.values() if d.user == user and is_live(d.status)]
        check_limits(
            limits,
            deployments=len(live),
            ranks=sum(d.spec.world.target for d in live),
            new_deployments=new_deployments,
            new_ranks=new_ranks,
        )


class MemoryKeys:
    """API keys in a dict."""

    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}

    async def add_key(self, key: ApiKey) -> None:
        if any(key.id == other.id or key.digest == other.digest for other in self._keys.values()):
            raise Conflict(f"there is a key {key.id!r}, or the same key under another name, already")
        self._keys[key.id] = key

    async def find_key(self, digest: str) -> ApiKey | None:
        return next((key for key in self._keys.values() if key.digest == digest), None)

    async def keys(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.id))

    async def revoke_key(self, id: str) -> bool:
        return self._keys.pop(id, None) is not None


def _version(changed: tuple[str, int]) -> int:
    return changed[1]
