"""The usage of deleted runs, in ConfigMaps of the user's namespace; it also records every instance name ever given.

A row is kept under a key of its own, so that writing it twice is writing it once, in one of sixteen ConfigMaps, so that
none of them has to hold them all.
"""

import hashlib
import json
import logging

from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.namespaces import goes_anyway
from basilica.kube.manifests.userdeployment import Json
from basilica.ports import UsageRow
from basilica.stores.kubernetes.calls import MANAGED_BY, core_path, unavailable

log = logging.getLogger("basilica.store")

LABEL = "basilica.dev/ledger"
ROWS_MAX = 5000  # of about 160 bytes: an object of Kubernetes has no room for many more


class Ledger:
    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def write(self, namespace: str, row: UsageRow) -> None:
        """Write a row; the oldest of a full ConfigMap makes room."""
        values = [row.name, row.rank_seconds, row.gpu_seconds, row.created_at, row.ended_at]
        values += [row.training_seconds, row.lost_seconds]
        text = json.dumps(values, separators=(",", ":"))
        name = _page(row.instance)
        path = core_path(namespace, "configmaps", name)
        try:
            page = await self._get(path)
            if page is None:
                page = await self._begin(namespace, name)
            data: dict[str, str | None] = {row.instance: text}
            rows = page.get("data") or {}
            if row.instance not in rows and len(rows) >= ROWS_MAX:
                data[min(rows, key=lambda instance: json.loads(rows[instance])[3])] = None
            await self._api.merge_patch(path, {"data": data})
        except ApiError as error:
            if not await goes_anyway(self._api, namespace, error):
                raise unavailable(error) from error
            log.info("%s ends, and what %s used goes with it", namespace, row.instance)

    async def has(self, namespace: str, instance: str) -> bool:
        try:
            page = await self._get(core_path(namespace, "configmaps", _page(instance)))
        except ApiError as error:
            raise unavailable(error) from error
        return page is not None and instance in (page.get("data") or {})

    async def rows(self, namespace: str, user: str) -> list[UsageRow]:
        try:
            pages, _ = await self._api.list(core_path(namespace, "configmaps"), label_selector=LABEL)
        except ApiError as error:
            raise unavailable(error) from error
        return [parse_row(user, i, text) for page in pages for i, text in (page.get("data") or {}).items()]

    async def _get(self, path: str) -> Json | None:
        try:
            return await self._api.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _begin(self, namespace: str, name: str) -> Json:
        metadata = {"name": name, "namespace": namespace, "labels": MANAGED_BY | {LABEL: "usage"}}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        try:
            return await self._api.create(core_path(namespace, "configmaps"), body)
        except ApiError as error:
            if error.status == 409:
                return await self._api.get(core_path(namespace, "configmaps", name))
            raise


def _page(instance: str) -> str:
    return f"basilica-usage-{hashlib.sha256(instance.encode()).hexdigest()[0]}"


def parse_row(user: str, instance: str, text: str) -> UsageRow:
    name, rank_seconds, gpu_seconds, created_at, ended_at, *spent = json.loads(text)
    training, lost = spent or (0.0, 0.0)  # an earlier version wrote neither
    return UsageRow(
        user=user,
        instance=instance,
        name=name,
        rank_seconds=rank_seconds,
        gpu_seconds=gpu_seconds,
        created_at=created_at,
        ended_at=ended_at,
        training_seconds=training,
        lost_seconds=lost,
    )
