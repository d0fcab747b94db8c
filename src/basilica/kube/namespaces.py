"""The namespaces of users."""

from basilica.kube.api import ApiError, KubeApi


def is_terminating(error: ApiError) -> bool:
    """Whether a write was refused because its namespace is being deleted: nothing can be made there any more."""
    return error.status == 403 and "being terminated" in error.message


async def make_namespace(api: KubeApi, namespace: str) -> None:
    """Make it unless it is there. Pods in it are held to what the runtime makes of them."""
    labels = {"app.kubernetes.io/managed-by": "basilica", "pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    try:
        await api.create("/api/v1/namespaces", body)
    except ApiError as error:
        if error.status != 409:
            raise
