"""Translation of refusals by the Kubernetes API into errors of the runtime."""

from collections.abc import Iterator
from contextlib import contextmanager

from basilica.core.errors import RuntimeUnavailable
from basilica.kube.client.api import ApiError


@contextmanager
def refusals(what: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise RuntimeUnavailable(f"{what}: {error}") from error
