"""Whether an operator is at work, as somebody sees it who only reads: its Lease changes every few seconds.

While the Lease itself cannot be watched, it is the cluster's API server that is away.

No clocks are compared: what counts is how long ago the Lease was seen to change here.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from basilica.core.why import Absence
from basilica.kube.client.api import KubeApi
from basilica.kube.client.informer import Informer
from basilica.kube.manifests.userdeployment import Json
from basilica.operator.election import DURATION, NAME

BLIND_COUNTS_S = 3.0  # a watch that breaks is opened again within moments
PATIENCE = 3.0  # lease durations: one that hands over in order, or is lost, is followed by another within two


class Attendance:
    """Follows the Lease while it is entered."""

    def __init__(self, api: KubeApi, namespace: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._lease = Informer(
            api, leases, field_selector=f"metadata.name={NAME}", on_change=self._seen, monotonic=monotonic
        )
        self._monotonic = monotonic
        self._patience = DURATION * PATIENCE
        self._since = monotonic()

    def _seen(self, lease: Json) -> None:
        self._since = self._monotonic()
        duration = lease["spec"].get("leaseDurationSeconds")
        if duration:
            self._patience = duration * PATIENCE

    @property
    def absence(self) -> Absence | None:
        """Why what is known may be old: the cluster cannot be asked, or no operator is at work."""
        blind = self._lease.behind_for
        if blind is not None:
            return Absence("cluster", blind) if blind >= BLIND_COUNTS_S else None
        absent = self.absent_for
        return None if absent is None else Absence("operator", absent)

    @property
    def absent_for(self) -> float | None:
        """For how many seconds no operator has been heard of; None while that is no cause for concern."""
        if self._lease.problem is not None or not self._lease.is_synced:
            return None  # it is we who see nothing
        silent = self._monotonic() - self._since
        return silent if silent > self._patience else None

    async def __aenter__(self) -> Self:
        self._lease.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lease.close()
