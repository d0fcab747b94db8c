"""Answers to objects that are no runs, and to runs whose Secret is missing: a condition on the object itself."""

from basilica.core.errors import DeploymentNotFound, StaleVersion
from basilica.stores.kubernetes.store import KubernetesStore


class Refusals:
    """Published by the leader: one writer is enough."""

    def __init__(self, store: KubernetesStore) -> None:
        self._store = store

    async def next(self) -> None:
        """Return when there may be more to publish."""
        await self._store.noticed.wait()

    async def publish(self) -> None:
        self._store.noticed.clear()
        for record in self._store.problems():
            if not record.refused:
                continue  # an object that is unreadable for another reason is no fault of its owner
            try:
                await self._store.refuse(record, str(record.problem))
            except (StaleVersion, DeploymentNotFound):
                self._store.noticed.set()  # the newer version has been read by now
        for record, problem in self._store.lacking():
            try:
                await self._store.explain(record, problem)
            except (StaleVersion, DeploymentNotFound):
                self._store.noticed.set()
