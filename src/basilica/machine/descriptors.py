"""The limit of open file descriptors of this process."""

import resource
from contextlib import suppress


def raise_descriptor_limit() -> int:
    """Raise the limit of this process as far as the system allows. Return the old one: ranks are started with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than their hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def descriptor_limit() -> int | None:
    """Return the number of descriptors that this process may have open; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
