"""Checks of the arguments of executors: an impossible argument is refused before any replica is started."""

import logging
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from basilica.executors.environment import RANK_ENV
from basilica.executors.protocol import ReplicaHandle

log = logging.getLogger("basilica.executors")
DAY_SECONDS = 86400.0
RUN_ID = "diloco"  # the default prefix of the names of gangs

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENTRYPOINT = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?::[^\W\d]\w*(?:\.[^\W\d]\w*)*)?")


def check_launch(
    n_replicas: int, entrypoint: object, entrypoint_args: object, timeout: float, *, callables: bool
) -> None:
    """Raise `ValueError` for an impossible number, text or time; `TypeError` for a wrong type."""
    if isinstance(n_replicas, bool) or not isinstance(n_replicas, int):
        raise TypeError(f"n_replicas must be a whole number, not {n_replicas!r}")
    if n_replicas < 1:
        raise ValueError(f"n_replicas must be at least 1, not {n_replicas}")
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if not isinstance(entrypoint_args, Mapping):
        raise TypeError(f"entrypoint_args must be a mapping of keyword arguments, not {type(entrypoint_args).__name__}")
    for name in entrypoint_args:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"entrypoint_args: {name!r} is no name of an argument")
    rank_env = entrypoint_args.get(RANK_ENV)
    if rank_env is not None and not (isinstance(rank_env, str) and _VARIABLE.fullmatch(rank_env)):
        raise ValueError(f"{RANK_ENV}={rank_env!r} is no name of a variable")
    if callable(entrypoint):
        if not callables:
            raise ValueError(
                f"this backend runs {_name(entrypoint)} from an image of its own: "
                'give "package.module:function" and have the module in the image'
            )
    elif not isinstance(entrypoint, str):
        raise TypeError(f'entrypoint must be "package.module:function" or a module, not {type(entrypoint).__name__}')
    elif not _ENTRYPOINT.fullmatch(entrypoint):
        raise ValueError(f'entrypoint {entrypoint!r} is not of the form "package.module:function" or "package.module"')


def check_timeout(timeout: float | None) -> float:
    """Return the seconds that `collect` waits: a day by default."""
    if timeout is None:
        return DAY_SECONDS
    if not timeout >= 0:  # false for NaN too
        raise ValueError(f"timeout must be a number of seconds, not {timeout!r}")
    return timeout


def check_seconds(name: str, value: object) -> None:
    """Raise `ValueError` unless the option is a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, not {value!r}")


def check_lines(n_lines: int) -> None:
    if not isinstance(n_lines, int) or n_lines < 1:
        raise ValueError(f"n_lines must be a number of lines, at least 1, not {n_lines!r}")


def check_run_id(run_id: str | None, pattern: re.Pattern[str], rule: str) -> str:
    """Return the prefix of the names of gangs; raise `ValueError` with the backend's rule if it breaks that."""
    if run_id is not None and not pattern.fullmatch(run_id):
        raise ValueError(f"run_id {run_id!r}: {rule}")
    return run_id or RUN_ID


def new_gang_name(run_id: str) -> str:
    return f"{run_id}-{secrets.token_hex(4)}"


class UnknownHandle(ValueError):
    """A handle that names no replica of the executor it was given to."""


def check_backend(handle: ReplicaHandle, backend_name: str) -> None:
    if handle.backend_name != backend_name:
        raise UnknownHandle(f"a handle of {handle.backend_name!r} was given to the executor {backend_name!r}")


def named_in(handle: ReplicaHandle, backend_name: str, key: str, default: str | None = None) -> str:
    """Return the name in a handle's metadata under `key`; raise `UnknownHandle` if there is none."""
    check_backend(handle, backend_name)
    name = handle.metadata.get(key) or default
    if not isinstance(name, str) or not name:
        raise UnknownHandle(
            f"the handle of rank {handle.rank} has no {key!r} in its metadata, so it names no replica of the executor "
            f"{backend_name!r}; use the handles that launch_replicas() returned"
        )
    return name


@contextmanager
def allow_unknown_handle() -> Iterator[None]:
    """For `cancel`: log a handle that names no replica, instead of an error."""
    try:
        yield
    except UnknownHandle as unknown:
        log.warning("nothing is cancelled: %s", unknown)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))
