"""Retention: the removal of old runs and archives, once at the start and then every hour."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from basilica.core.damage import DamagedRun
from basilica.core.deployment import Deployment
from basilica.core.errors import BasilicaError, DeploymentDamaged, DeploymentNotFound
from basilica.core.spec import Wanted
from basilica.ports import Clock, Runtime, Store

log = logging.getLogger("basilica.retention")

PERIOD_SECONDS = 3600.0
ARCHIVE_SECONDS = 86400.0  # how long an archive is kept that no run uses

Work = Callable[[], Awaitable[list[str]]]
"""Removes the things that are too old, and returns their names."""


class Retention:
    """The hourly removals. `run_seconds`: how long ended runs are kept; None keeps them until they are deleted or
    pruned."""

    def __init__(self, store: Store, runtime: Runtime, clock: Clock, run_seconds: float | None) -> None:
        self._store, self._runtime, self._clock, self._run_seconds = store, runtime, clock, run_seconds

    @property
    def works(self) -> Sequence[Work]:
        return (self.delete_old_runs, self.forget_archives)

    async def delete_old_runs(self) -> list[str]:
        """Delete the ended runs of all users that are older than the retention."""
        if self._run_seconds is None:
            return []
        return await self.prune(self._run_seconds, lambda _: True)

    async def forget_archives(self) -> list[str]:
        """Remove the archives that no run has used for a day."""

        async def in_use() -> set[tuple[str, str]]:
            found = await self._store.listed()
            for run in found:
                if isinstance(run, DamagedRun):
                    raise DeploymentDamaged(run)  # the archive that it needs is unknown: all archives are kept
            return {(d.user, d.spec.archive) for d in found if isinstance(d, Deployment) and d.spec.archive is not None}

        return await self._runtime.forget_archives(in_use, self._clock.now() - ARCHIVE_SECONDS)

    async def prune(self, older_than: float, chosen: Callable[[Deployment], bool]) -> list[str]:
        """Delete the chosen runs that ended more than `older_than` seconds ago."""
        names: list[str] = []
        for instance in await self._store.prune(self._clock.now() - older_than):
            try:
                if chosen(await self._store.get(instance)):
                    await self._store.change_spec(instance, lambda d: d.spec.ended_by(Wanted.DELETE))
                    names.append(instance)
            except (DeploymentNotFound, DeploymentDamaged):  # people, not the retention, remove an unreadable run
                continue
        return names


async def repeat_hourly(works: Sequence[Work]) -> None:
    """Run all works now and then every hour. The failure of one work does not prevent the others."""
    while True:
        for work in works:
            try:
                for name in await work():
                    log.info("removing %s: older than the retention", name)
            except BasilicaError as error:
                log.warning("retention: %s", error)
        await asyncio.sleep(PERIOD_SECONDS)
