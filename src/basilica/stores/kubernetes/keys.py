"""API keys as Secrets of the control plane's own namespace. They hold digests only; one watch follows changes."""

import hashlib

from basilica.core.errors import Conflict
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.informer import Informer
from basilica.kube.manifests.userdeployment import Json
from basilica.ports import ApiKey
from basilica.stores.kubernetes.calls import core_path, decoded, secret_body, unavailable
from basilica.stores.kubernetes.cluster import synced

LABEL = "basilica.dev/api-key"


class KubernetesKeys:
    """A lookup costs no request: all keys are in memory, and a revocation reaches all servers at once."""

    def __init__(self, api: KubeApi, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._informer = Informer(api, core_path(namespace, "secrets"), label_selector=LABEL, on_change=self._on_change)
        self._keys: dict[str, ApiKey] = {}  # by the Secret's name

    async def open(self) -> None:
        await synced(self._informer)

    async def close(self) -> None:
        await self._informer.close()

    async def add_key(self, key: ApiKey) -> None:
        taken = Conflict(f"there is a key {key.id!r}, or the same key under another name, already")
        if any(key.id == other.id or key.digest == other.digest for other in self._keys.values()):
            raise taken
        values = {
            "id": key.id,
            "user": key.user,
            "digest": key.digest,
            "created-at": repr(key.created_at),
            "note": key.note,
        }
        body = secret_body(_secret_name(key.id), self._namespace, values, {LABEL: "true"})
        try:
            made = await self._api.create(core_path(self._namespace, "secrets"), body)
        except ApiError as error:
            raise (taken if error.status == 409 else unavailable(error)) from error
        self._store(made)

    async def find_key(self, digest: str) -> ApiKey | None:
        return next((key for key in self._keys.values() if key.digest == digest), None)

    async def keys(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.id))

    async def revoke_key(self, id: str) -> bool:
        name = _secret_name(id)
        try:
            was_there = await self._api.delete(core_path(self._namespace, "secrets", name))
        except ApiError as error:
            raise unavailable(error) from error
        self._keys.pop(name, None)
        return was_there

    def _on_change(self, obj: Json) -> None:
        found = self._informer.get(self._namespace, obj["metadata"]["name"])
        if found is not None and found["metadata"]["uid"] == obj["metadata"]["uid"]:
            self._store(obj)
        else:
            self._keys.pop(obj["metadata"]["name"], None)

    def _store(self, obj: Json) -> None:
        values = decoded(obj)
        try:
            self._keys[obj["metadata"]["name"]] = ApiKey(
                id=values["id"],
                user=values["user"],
                digest=values["digest"],
                created_at=float(values["created-at"]),
                note=values.get("note", ""),
            )
        except (KeyError, ValueError):
            self._keys.pop(obj["metadata"]["name"], None)  # not one of ours: it grants nothing


def _secret_name(id: str) -> str:
    plain = id if id.isalnum() and id.islower() else hashlib.sha256(id.encode()).hexdigest()[:16]
    return f"basilica-key-{plain}"
