"""Objects that are no runs, and runs that refer to what is not there: whoever made one is told on the object itself."""

from basilica.core.errors import DeploymentNotFound, StaleVersion
from basilica.stores.kubernetes.store import KubernetesStore


class Refusals:
    """The leader's work: one voice is enough."""

    def __init__(self, store: KubernetesStore) -> None:
        self._store = store

    async def next(self) -> None:
        """Return when there may be more to tell."""
        await self._store.noticed.wait()

    async def tell(self) -> None:
        self._store.noticed.clear()
        for record in self._store.problems():
            if not record.refused:
                continue  # what cannot be read for another reason is the operator's trouble, not its owner's fault
            try:
                await self._store.refuse(record, str(record.problem))
            except (StaleVersion, DeploymentNotFound):
                self._store.noticed.set()  # what is newer has been read by now
        for record, problem in self._store.lacking():
            try:
                await self._store.explain(record, problem)
            except (StaleVersion, DeploymentNotFound):
                self._store.noticed.set()
