"""What the disk and damaged records say, as the error that the controller understands and tries again after."""

from collections.abc import Iterator
from contextlib import contextmanager

from basilica.core.errors import BasilicaError, RuntimeUnavailable
from basilica.machine.files import UnusableFile


@contextmanager
def or_unavailable(what: str) -> Iterator[None]:
    """`what` could not be done: it stands before the reason."""
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
