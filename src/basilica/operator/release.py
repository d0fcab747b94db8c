"""Uninstallation without an operator: removes our finalizers, so that no deletion stays blocked."""

from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.manifests.userdeployment import EVERYWHERE, GROUP, Json, path_of

PODS = "/api/v1/pods"
OURS = "app.kubernetes.io/managed-by=basilica"


async def release_finalizers(api: KubeApi) -> list[str]:
    """Take our finalizers off runs and pods; return the names of those that had one. Other people's stay."""
    released: list[str] = []
    for path, selector in ((EVERYWHERE, ""), (PODS, OURS)):
        try:
            found, _ = await api.list(path, label_selector=selector)
        except ApiError as error:
            if error.status == 404 and path == EVERYWHERE:
                continue  # the definition is gone, and all runs with it
            raise
        for obj in found:
            if await _release(api, obj):
                metadata = obj["metadata"]
                released.append(f"{obj['kind'].lower()} {metadata['namespace']}/{metadata['name']}")
    return released


async def _release(api: KubeApi, obj: Json) -> bool:
    metadata = obj["metadata"]
    ours = [name for name in metadata.get("finalizers") or () if name.startswith(f"{GROUP}/")]
    if not ours:
        return False
    namespace, name = metadata["namespace"], metadata["name"]
    path = path_of(namespace, name) if obj["kind"] != "Pod" else f"/api/v1/namespaces/{namespace}/pods/{name}"
    left = [item for item in metadata["finalizers"] if item not in ours]
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": left}}
    try:
        await api.merge_patch(path, body)
    except ApiError as error:
        if error.status == 404:
            return False
        if error.status != 409:
            raise
        return await _release(api, {"kind": obj["kind"], **await api.get(path)})  # it changed in between
    return True
