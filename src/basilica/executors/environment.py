"""The environment of replicas, which `diloco/replica_entrypoint.py` reads."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

REPLICA_MODULE = "basilica.diloco.replica_entrypoint"
RANK_ENV = "rank_env"  # the argument that names one more variable for the rank; a local convention
RENDEZVOUS_URI = "rendezvous_uri"  # the argument with the URI where replicas meet and results are stored

# Variables of the contract itself; an argument of that name must not replace one.
_OURS = frozenset({"REPLICA_RANK", "WORLD_SIZE", "ENTRYPOINT", "ENTRYPOINT_ARGS"})
# An argument called `path` is common, and a replica whose PATH it replaced would find no program any more.
_THE_MACHINES = frozenset({"PATH", "HOME", "USER", "SHELL", "LANG", "TMPDIR", "PWD", "PYTHONPATH", "LD_LIBRARY_PATH"})


def replica_environment(
    n_replicas: int, entrypoint: str, entrypoint_args: Mapping[str, Any], *, remote: bool
) -> dict[str, str]:
    """Return the environment of all replicas of a gang; `REPLICA_RANK` is each one's own and not in it.

    On remote backends an argument that is no JSON is left out with a warning, and `rank_env` is not passed.
    """
    passed = _json_only(entrypoint_args, entrypoint) if remote else dict(entrypoint_args)
    environment = {
        name.upper(): _text(value)
        for name, value in passed.items()
        if isinstance(value, str | int | float) and name.upper() not in _OURS | _THE_MACHINES
    }
    return environment | {
        "WORLD_SIZE": str(n_replicas),
        "ENTRYPOINT": entrypoint,
        "ENTRYPOINT_ARGS": json.dumps(passed),
    }


def _json_only(arguments: Mapping[str, Any], entrypoint: str) -> dict[str, Any]:
    passed = {}
    for name, value in arguments.items():
        if name == RANK_ENV:
            continue
        if is_json(value):
            passed[name] = value
            continue
        kind = type(value).__name__
        warnings.warn(
            f"the argument {name!r} of {entrypoint} ({kind}) is no JSON and does not reach the replicas",
            stacklevel=4,
        )
    return passed


def is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _text(value: str | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
