"""The store's API calls beside the custom resources, and the translation of their errors."""

import base64

from basilica.core.errors import BasilicaError, StoreUnavailable, ValidationError
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.manifests.userdeployment import Json

MANAGED_BY = {"app.kubernetes.io/managed-by": "basilica"}


def core_path(namespace: str, plural: str, name: str = "") -> str:
    return "/".join(part for part in (f"/api/v1/namespaces/{namespace}/{plural}", name) if part)


def unavailable(error: ApiError) -> BasilicaError:
    """Return our error for a failed call; nothing was changed. Causes are the cluster, an invalid spec, or missing
    rights.
    """
    if error.status == 422:
        return ValidationError("spec", error.reason, error.message)
    if error.status == 413:
        return ValidationError("spec", error.reason, "is too large for a Kubernetes object")
    if error.status in (401, 403):
        return StoreUnavailable(f"Kubernetes does not let us: {error.message}; see 'basilica manifests' for the rights")
    if error.status == 404:
        return StoreUnavailable(
            f"Kubernetes knows nothing of UserDeployments: {error.message}; 'basilica manifests | kubectl apply -f -'"
        )
    return StoreUnavailable(f"the Kubernetes API: {error}")


def is_gone(error: ApiError, name: str) -> bool:
    """Whether that object is not there. A starting API server answers 404 to every request for a custom resource."""
    return error.status == 404 and f'"{name}"' in error.message


async def read_secret(api: KubeApi, namespace: str, name: str) -> dict[str, str]:
    try:
        found = await api.get(core_path(namespace, "secrets", name))
    except ApiError as error:
        if error.status == 404:
            raise StoreUnavailable(f"the Secret {namespace}/{name} that a run refers to is not there") from error
        raise unavailable(error) from error
    return decoded(found)


def decoded(secret: Json) -> dict[str, str]:
    """Return the values of a Secret."""
    data = secret.get("data") or {}
    return {key: base64.b64decode(value).decode("utf-8", "replace") for key, value in data.items()}


def secret_body(name: str, namespace: str, values: dict[str, str], labels: dict[str, str]) -> Json:
    """Return an immutable Secret, so that a run's variables are those that it was started with."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": MANAGED_BY | labels},
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }
