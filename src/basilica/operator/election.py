"""Leader election among operators: the holder of the Lease acts.

No two clocks are compared. A holder counts its time from before it requested its last renewal, and stops two thirds
through. A candidate counts from when it saw the Lease change last, and takes over when it has not changed for the whole
duration. So there is a third of the duration between the two, whatever the clocks show.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.manifests.userdeployment import Json

log = logging.getLogger("basilica.operator")

NAME = "basilica-operator"
DURATION = 15.0


class Election:
    """`acquire`, then run `keep` beside the work, which returns when the work must stop, then `release`."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        identity: str,
        name: str = NAME,
        duration: float = DURATION,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self.identity, self._name, self.duration = api, identity, name, duration
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._leases}/{name}"
        self._monotonic = monotonic
        self._version = ""  # of the Lease as we wrote it last
        self._seen: tuple[str, float] = ("", 0.0)  # its version as we saw it last, and when that was new to us
        self._renewed = 0.0
        self.holder = ""
        self.leading = False

    async def acquire(self) -> None:
        """Return when the Lease is ours."""
        while not await self._try():
            await asyncio.sleep(self.duration / 5 * random.uniform(0.8, 1.2))
        self.leading = True
        log.info("%s leads", self.identity)

    async def keep(self) -> None:
        """Renew the Lease as long as possible; the return means that another operator may lead soon, or does."""
        try:
            while True:
                await asyncio.sleep(self.duration / 3 * random.uniform(0.8, 1.0))
                left = self._renewed + self.duration * 2 / 3 - self._monotonic()
                try:
                    async with asyncio.timeout(left):
                        while not await self._renew():
                            await asyncio.sleep(self.duration / 30)
                except TimeoutError:
                    log.error("the lease could not be renewed in time")
                    return
                if not self.leading:
                    log.error("the lease was taken by %s", self.holder or "nobody")
                    return
        finally:
            self.leading = False

    async def release(self) -> None:
        """Let another operator take over at once. If this does not arrive, it takes over when our time is up."""
        if not self._version:
            return
        body = self._body(holder="")
        body["spec"]["leaseDurationSeconds"] = 1
        try:
            async with asyncio.timeout(self.duration / 3):
                await self._api.merge_patch(self._path, body)
        except (ApiError, TimeoutError) as error:
            log.info("the lease could not be released: %s", error)

    async def _try(self) -> bool:
        started = self._monotonic()
        try:
            found = await self._api.get(self._path)
        except ApiError as error:
            if error.status != 404:
                log.warning("the lease cannot be read: %s", error)
                return False
            return await self._write(None, started)
        spec = found.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        if self.holder not in ("", self.identity) and not self._expired(found):
            return False
        return await self._write(found, started)

    def _expired(self, lease: Json) -> bool:
        version, now = str(lease["metadata"]["resourceVersion"]), self._monotonic()
        if version != self._seen[0]:
            self._seen = (version, now)
        theirs = float((lease.get("spec") or {}).get("leaseDurationSeconds") or self.duration)
        return now - self._seen[1] >= theirs

    async def _write(self, found: Json | None, started: float) -> bool:
        """Take the Lease as it was found; False if another candidate was faster."""
        try:
            if found is None:
                body = self._body(holder=self.identity, taking=True, transitions=0)
                body["metadata"] = {"name": self._name}
                written = await self._api.create(self._leases, body)
            else:
                self._version = str(found["metadata"]["resourceVersion"])
                transitions = int((found.get("spec") or {}).get("leaseTransitions") or 0) + 1
                body = self._body(holder=self.identity, taking=True, transitions=transitions)
                written = await self._api.merge_patch(self._path, body)
        except ApiError as error:
            self._version = ""
            if error.status != 409:
                log.warning("the lease cannot be taken: %s", error)
            return False
        self._took(written, started)
        return True

    async def _renew(self) -> bool:
        """Renew once; True when the outcome is known: renewed, or lost."""
        started = self._monotonic()
        try:
            self._took(await self._api.merge_patch(self._path, self._body(holder=self.identity)), started)
            return True
        except ApiError as error:
            log.warning("the lease was not renewed: %s", error)
        try:
            found = await self._api.get(self._path)
        except ApiError as error:
            if error.status != 404:
                return False
            self.holder, self.leading = "", False
            return True
        self.holder = (found.get("spec") or {}).get("holderIdentity") or ""
        if self.holder != self.identity:
            self._version, self.leading = "", False
            return True
        self._version = str(found["metadata"]["resourceVersion"])  # it was edited, or our answer was lost
        return False

    def _took(self, lease: Json, started: float) -> None:
        self._version, self._renewed, self.holder = str(lease["metadata"]["resourceVersion"]), started, self.identity

    def _body(self, *, holder: str, taking: bool = False, transitions: int | None = None) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Json = {"holderIdentity": holder, "leaseDurationSeconds": max(1, round(self.duration)), "renewTime": now}
        spec |= {"acquireTime": now} if taking else {}
        spec |= {} if transitions is None else {"leaseTransitions": transitions}
        metadata = {"resourceVersion": self._version} if self._version else {}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
