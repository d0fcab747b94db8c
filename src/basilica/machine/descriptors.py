"""The limit of open file descriptors of this process."""

import resource
from contextlib import suppress


def more_descriptors() -> int:
    """Raise our own limit as far as the system allows, and return what it was: ranks are started with that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def descriptor_limit() -> int | None:
    """How many descriptors this process may have open; None: as many as it likes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
