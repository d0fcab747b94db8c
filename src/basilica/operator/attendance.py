"""Attendance: a reader's check whether an operator is at work, by its Lease, which changes every few seconds.

While the Lease itself cannot be watched, the cluster's API server is away. No clocks are compared: only the time since
the Lease was seen to change here counts.
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

BLIND_COUNTS_S = 3.0  # a broken watch is opened again within moments
PATIENCE = 3.0  # lease durations: a leader that hands over, or is lost, has a successor within two


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
        """Why reads may be out of date: the cluster does not answer, or no operator is at work."""
        blind = self._lease.behind_for
        if blind is not None:
            return Absence("cluster", blind) if blind >= BLIND_COUNTS_S else None
        absent = self.absent_for
        return None if absent is None else Absence("operator", absent)

    @property
    def absent_for(self) -> float | None:
        """The seconds without a sign of an operator; None while that is no cause for concern."""
        if self._lease.problem is not None or not self._lease.is_synced:
            return None  # our own watch is broken
        silent = self._monotonic() - self._since
        return silent if silent > self._patience else None

    async def __aenter__(self) -> Self:
        self._lease.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lease.close()
