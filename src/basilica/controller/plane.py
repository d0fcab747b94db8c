"""The control plane: every operation of users on runs, without the transport. The API's routes are thin shells
around it."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from basilica.controller.retention import Retention
from basilica.controller.step import run_of
from basilica.core import accounts, metering
from basilica.core.damage import DamagedRun, Trouble
from basilica.core.deployment import Deployment
from basilica.core.errors import (
    BasilicaError,
    Conflict,
    DeploymentDamaged,
    DeploymentNotFound,
    UDTerminalState,
    ValidationError,
    WorldClosed,
)
from basilica.core.events import Event, Reason
from basilica.core.moments import shifted
from basilica.core.names import instance_name, namespace_of
from basilica.core.resume import Resume, parse_resume
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.why import Absence
from basilica.ports import Clock, Limits, Run, Runtime, Store, UsageRow

T = TypeVar("T")
DEFAULT_LIMITS = Limits(deployments=10_000, ranks=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and lifetimes.

    `retention_seconds`: how long ended runs are kept; None keeps them until they are deleted or pruned.
    `idle_exit_seconds`: how long the server stays up without a live run or a request; None means for ever."""

    limits: Limits = DEFAULT_LIMITS
    retention_seconds: float | None = None
    idle_exit_seconds: float | None = None


class ControlPlane:
    """Operations on runs. Every method takes the requesting user; runs of other users do not exist for it.

    `unattended` returns why no controller acts on requests or observes runs, if that is a cause for concern;
    `troubles` returns the damaged, lost or full parts of the server.
    """

    def __init__(  # noqa: PLR0917 (the parts that it is made of)
        self,
        store: Store,
        runtime: Runtime,
        clock: Clock,
        settings: Settings,
        unattended: Callable[[], Absence | None] = lambda: None,
        troubles: Callable[[], list[Trouble]] = list,
    ) -> None:
        self.store, self.runtime, self.clock, self.settings = store, runtime, clock, settings
        self.unattended, self._troubles = unattended, troubles
        self.retention = Retention(store, runtime, clock, settings.retention_seconds)

    async def troubles(self) -> list[Trouble]:
        """Return the faults of the server as a whole. The checks may touch the disk: they run in a thread."""
        return await asyncio.to_thread(self._troubles)

    def now(self) -> float:
        """Return the current time by the wall clock as it is set now."""
        return self.clock.now() + self.clock.shift()

    def shown(self, value: T) -> T:
        """Return a run, an event or an account with its timestamps by the wall clock as it is set now."""
        return shifted(value, self.clock.shift())

    async def create(self, user: str, spec: DeploymentSpec, idempotency_key: str | None) -> Deployment:
        await self._check_archive(user, spec)
        if spec.resume_from is not None:
            spec = await self._resumed(user, spec, spec.resume_from)
        return await self._create(user, spec, idempotency_key)

    async def _resumed(self, user: str, spec: DeploymentSpec, wish: str) -> DeploymentSpec:
        """Return the spec with the instance of the run that it goes on from; the names of runs are used again."""
        field, wanted = "distributed.resumeFrom", parse_resume(wish)
        try:
            found = await self.get(user, wanted.run)
        except DeploymentNotFound:
            problem = "there is no such run; 'basilica train ls' lists those that can be resumed"
            raise ValidationError(field, wish, problem) from None
        again = replace(spec, resume_from=found.spec.resume_from)
        if found.spec.resume_from is not None and again == found.spec and not found.status.settled:
            return again  # this request, repeated: the store knows its key
        return replace(spec, resume_from=str(await self._origin(found, wanted.step)))

    async def _origin(self, found: Deployment, step: int | None) -> Resume:
        """Return where a run that goes on from this one begins; `Conflict` while this one's ranks may still write.

        A run that was resumed and kept no step of its own passes on where it began.
        """
        name = found.instance
        if not found.status.phase.terminal:
            raise Conflict(
                f"{name} has not ended; cancel it first (basilica train cancel {name} --wait), then resume it"
            )
        if not found.status.settled:
            raise Conflict(f"the ranks of {name} are still being stopped; resume it when they have ended")
        if step is None and found.spec.resume_from is not None and await self.runtime.checkpoints(run_of(found)) == ():
            return parse_resume(found.spec.resume_from)
        return Resume(name, step)

    async def _create(self, user: str, spec: DeploymentSpec, idempotency_key: str | None) -> Deployment:
        now = self.clock.now()
        deployment = Deployment(
            instance=instance_name(spec.name, secrets.token_hex(4)),
            user=user,
            namespace=namespace_of(user),
            spec=spec,
            status=DeploymentStatus(created_at=now),
            version=0,
        )
        size = spec.world
        events = [Event(Reason.CREATED, f"a world of {size.target} wanted, within {size.min}..{size.max}")]
        if spec.image and not self.runtime.runs_images:
            text = f"image {spec.image[:200]!r} is not used: ranks are processes of this machine"
            events.append(Event("ImageIgnored", text))
        return await self.store.create(deployment, events, idempotency_key=idempotency_key, limits=self.settings.limits)

    async def _check_archive(self, user: str, spec: DeploymentSpec) -> None:
        if spec.archive is not None and not await self.runtime.has_archive(user, spec.archive):
            problem = "there is no such archive here; send it with PUT /archives first"
            raise ValidationError("workdirArchive", spec.archive, problem)

    async def rerun(self, user: str, name: str, idempotency_key: str | None, *, resume: bool = False) -> Deployment:
        """Create a new run with the spec of that one, and with the world size that was last requested.

        With `resume`, the new run goes on from that one's progress; else it begins where that one began.
        """
        found = await self.get(user, name)
        again = replace(found.spec, wanted=Wanted.RUN, generation=1, gang=0)
        if resume:
            again = replace(again, resume_from=str(await self._origin(found, None)))
        await self._check_archive(user, again)
        return await self._create(user, again, idempotency_key)

    async def get(self, user: str, name: str) -> Deployment:
        return await self.store.find(namespace_of(user), name)

    async def deployments(self, user: str) -> list[Deployment]:
        return await self.store.deployments(namespace_of(user))

    async def listed(self, user: str) -> list[Deployment | DamagedRun]:
        return await self.store.listed(namespace_of(user))

    async def scale(self, user: str, name: str, target: int) -> Deployment:
        found = await self.get(user, name)

        def change(deployment: Deployment) -> DeploymentSpec:
            spec, status = deployment.spec, deployment.status
            if status.phase.terminal or spec.wanted is not Wanted.RUN:
                raise UDTerminalState(status.phase.value, target, spec.name)
            scaled = spec.scaled(target)
            if target == spec.world.target:
                return spec
            if status.closed:
                raise WorldClosed(spec.name, target)
            return scaled

        event = Event(Reason.SCALE_REQUESTED, f"a world of {target} wanted")
        return await self.store.change_spec(found.instance, change, [event], limits=self.settings.limits)

    async def restart(self, user: str, name: str) -> Deployment:
        """Start all ranks of the run afresh."""

        def change(deployment: Deployment) -> DeploymentSpec:
            spec, status = deployment.spec, deployment.status
            if status.phase.terminal or spec.wanted is not Wanted.RUN:
                raise UDTerminalState(status.phase.value, name=spec.name)
            if status.closed:
                raise WorldClosed(spec.name, spec.world.target)
            return spec.restarted()

        found = await self.get(user, name)
        event = Event("RestartRequested", "all ranks start afresh")
        return await self.store.change_spec(found.instance, change, [event])

    async def cancel(self, user: str, name: str) -> Deployment:
        """End the run and keep its record. An ended run is not changed."""

        def change(deployment: Deployment) -> DeploymentSpec:
            if deployment.status.phase.terminal:
                return deployment.spec
            return deployment.spec.ended_by(Wanted.CANCEL)

        found = await self.get(user, name)
        return await self.store.change_spec(found.instance, change)

    async def delete(self, user: str, name: str) -> Deployment:
        """End the run; its record, readable or not, is removed when none of its processes runs any more."""
        try:
            found = await self.get(user, name)
        except DeploymentDamaged as error:
            return await self.store.condemn(error.run.instance)
        return await self.store.change_spec(found.instance, lambda d: d.spec.ended_by(Wanted.DELETE))

    async def prune(self, user: str, older_than: float) -> list[str]:
        """Delete the user's runs that ended more than `older_than` seconds ago."""
        namespace = namespace_of(user)
        return await self.retention.prune(older_than, lambda d: d.namespace == namespace)

    async def usage(self, user: str, limit: int, offset: int) -> list[UsageRow]:
        """Return the usage by run, newest first; the usage of a live run is counted up to now."""
        rows = await self.store.usage(user, limit=limit, offset=offset)
        return [row if row.ended_at is not None else await self._counted(row) for row in rows]

    async def _counted(self, row: UsageRow) -> UsageRow:
        try:
            status = (await self.store.get(row.instance)).status
        except BasilicaError:  # deleted meanwhile, or unreadable: the row as it was last recorded
            return row
        until = self.counted_until()
        used, spent = metering.total(status, until), accounts.spent(status, until)
        return replace(
            row,
            rank_seconds=used.rank_seconds,
            gpu_seconds=used.gpu_seconds,
            training_seconds=spent.training_seconds,
            lost_seconds=spent.lost_seconds,
        )

    def counted_until(self) -> float | None:
        """Return the time up to which live runs are metered; None while no controller observes them: their state is
        then unknown."""
        return self.clock.now() if self.unattended() is None else None

    async def run(self, user: str, name: str) -> Run:
        return run_of(await self.get(user, name))
