"""The namespaces of users: making one, and writing to one in which our rights (`kube.roles`) may be a moment late."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from basilica.kube.client.api import ApiError, KubeApi, delay
from basilica.kube.manifests.roles import MANAGED

T = TypeVar("T")

RIGHTS_WITHIN_S = 10.0


def is_terminating(error: ApiError) -> bool:
    """Whether a write was refused because its namespace is being deleted: nothing can be made there any more."""
    return error.status == 403 and "being terminated" in error.message


async def goes_anyway(api: KubeApi, namespace: str, error: ApiError) -> bool:
    """Whether a request was refused because its namespace is being deleted, or is gone.

    Kubernetes deletes our role bindings there together with all else: what we have not removed by then is refused for
    lack of rights, and is removed by Kubernetes.
    """
    if is_terminating(error):
        return True
    if not lacks_rights(error):
        return False
    try:
        found, _ = await api.list("/api/v1/namespaces", field_selector=f"metadata.name={namespace}")
    except ApiError:
        return False
    return not found or "deletionTimestamp" in found[0]["metadata"]


async def make_namespace(api: KubeApi, namespace: str) -> None:
    """Make it unless it is there. Pods in it are held to what the runtime makes of them."""
    name, _, value = MANAGED.partition("=")
    labels = {name: value, "pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    try:
        await api.create("/api/v1/namespaces", body)
    except ApiError as error:
        if error.status != 409:
            raise


async def in_namespace(api: KubeApi, namespace: str, write: Callable[[], Awaitable[T]]) -> T:
    """Write to a user's namespace, which is made if it is not there. The operator gives rights in it within moments.

    Who has no right to look cannot tell a namespace without rights from one that does not exist.
    """
    deadline, tries = time.monotonic() + RIGHTS_WITHIN_S, 0
    while True:
        try:
            return await write()
        except ApiError as error:
            if not (error.status == 404 or lacks_rights(error)) or time.monotonic() >= deadline:
                raise
        if tries == 0:
            await make_namespace(api, namespace)
        else:
            await asyncio.sleep(delay(min(tries, 3)))
        tries += 1


def lacks_rights(error: ApiError) -> bool:
    """Refused by the roles that we have; a quota or a policy refuses with the same status."""
    return error.status == 403 and " cannot " in error.message
