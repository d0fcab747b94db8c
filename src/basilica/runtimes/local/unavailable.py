"""Conversion of disk errors and damaged records into the error after which the controller retries."""

from collections.abc import Iterator
from contextlib import contextmanager

from basilica.core.errors import BasilicaError, RuntimeUnavailable
from basilica.machine.files import UnusableFile


@contextmanager
def or_unavailable(what: str) -> Iterator[None]:
    """Raise disk errors and damaged records as `RuntimeUnavailable`: `what`, the failed action, then the reason."""
    try:
        yield
    except BasilicaError:
        raise
    except UnusableFile as error:
        raise RuntimeUnavailable(f"{what}: {error}") from error
    except OSError as error:
        raise RuntimeUnavailable(f"{what}: {error.strerror or error}") from error
    except ValueError as error:  # a damaged record
        raise RuntimeUnavailable(f"{what}: {error}") from error
