"""The start of replicas, shared by executors: their program, their handles, and the cleanup of a failed start."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from basilica.executors.environment import RANK_ENV, RENDEZVOUS_URI, REPLICA_MODULE, is_json, replica_environment
from basilica.executors.protocol import ReplicaHandle


def replica_command(python: str = "python") -> list[str]:
    """Return the default command of a replica."""
    return [python, "-u", "-m", REPLICA_MODULE]


def import_path() -> str:
    """Return the import path of this process, for replicas on the same machine."""
    return os.pathsep.join(os.path.abspath(place) for place in sys.path if os.path.exists(place or "."))


def shipped_function(
    function: Callable[..., Any], arguments: Mapping[str, Any], n_replicas: int, *, python: str, remote: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of replicas that call a function of this process.

    `remote`: they do not have the modules of this process.
    """
    from basilica.shipping.source import ship  # noqa: PLC0415  only functions need it

    passed = {name: value for name, value in arguments.items() if name != RANK_ENV}
    shipped = ship(function, kwargs=passed, python=python, remote=remote)
    called = getattr(function, "__qualname__", type(function).__qualname__)
    texts = {name: value for name, value in passed.items() if is_json(value)}  # the function gets the others, too
    return shipped.argv, replica_environment(n_replicas, called, texts, remote=False) | shipped.env


def gang_metadata(entrypoint_args: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return the metadata of all handles of a gang: the backend's own, and the URI of the rendezvous, if given."""
    uri = entrypoint_args.get(RENDEZVOUS_URI)
    return {**own, RENDEZVOUS_URI: uri} if isinstance(uri, str) else own


def gang_handles(backend_name: str, n_replicas: int, metadata: Mapping[str, Any]) -> list[ReplicaHandle]:
    return [ReplicaHandle(rank, backend_name, {**metadata, "rank": rank}) for rank in range(n_replicas)]


def start_each(
    n_replicas: int, start: Callable[[int], ReplicaHandle], cancel: Callable[[ReplicaHandle], None], *, known_as: str
) -> list[ReplicaHandle]:
    """Start replicas one by one. If one cannot be started, those before it are cancelled: none goes on alone.

    A note of the error names replicas that could not be cancelled, by the metadata under `known_as`.
    """
    handles: list[ReplicaHandle] = []
    try:
        for rank in range(n_replicas):
            handles.append(start(rank))
    except BaseException as error:  # Ctrl-C, too
        left = []
        for handle in handles:
            try:
                cancel(handle)
            except Exception:  # noqa: BLE001  the others are still to be cancelled, and the first error counts
                left.append(str(handle.metadata[known_as]))
        if left:
            error.add_note(f"still there, and to be ended by hand: {', '.join(left)}")
        raise
    return handles
