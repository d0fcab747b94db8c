"""The entrypoint of a replica: `python -m basilica.diloco.replica_entrypoint`.

It reads its environment, calls the user's function, and stores the result where `collect` finds it:

    REPLICA_RANK, WORLD_SIZE   the rank of this replica, and their number
    ENTRYPOINT                 "package.module:function", or a module, which is run as a program
    ENTRYPOINT_ARGS            the function's keyword arguments as JSON; in pieces (ENTRYPOINT_ARGS_0, …) where a
                               backend takes no long values
    REPLICA_ARGS_FILE          more of them, pickled, where the caller is on the same machine
    REPLICA_JOB                the name of the gang; it marks our result as this gang's
    BASILICA_RESULT_FILE       a file for the result, on the same machine
    RENDEZVOUS_URI             an object store for the result, else: `<uri>/results/<rank>.json`
    TORCHELASTIC_ERROR_FILE    a file for the error, in torchelastic's format
    REPLICA_FAILURE_FILE       a file for the error, as a line of text

It exits as the function does: 0, 1 after an exception (with its traceback on stderr), the code of a `SystemExit`. At
SIGTERM the hooks of `on_sigterm` are called; then it exits 143, unless one of them returns that the work will finish.
"""

import importlib
import inspect
import json
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from basilica.core import environment as env
from basilica.shipping.bootstrap import RESULT_MAX, plain, record, write

TERMINATED = 128 + signal.SIGTERM
RANK_VARIABLES = ("REPLICA_RANK", env.RANK, "RANK")
ERROR_CHARACTERS_MAX = 4000
RESULT_PATIENCE = 300.0
"""Seconds for which a store that has gone away meanwhile is asked to take the result: hours of work may be in it."""

Hook = Callable[[], bool | None]
_hooks: list[Hook] = []


class BadEnvironment(Exception):
    """The environment of the process is incomplete."""


# ---- being asked to end ------------------------------------------------------------------------------------------


def on_sigterm(hook: Hook) -> Hook:
    """Call `hook()` when this replica is asked to end (SIGTERM): the place to write a checkpoint.

    The replica exits with 143 after the hooks. If one returns True, it goes on instead: the function finishes soon by
    itself, and the replica exits as it does. Hooks run in the main thread, in the order in which they were given.
    Usable as a decorator.
    """
    if not callable(hook):
        raise TypeError(f"a hook is a function, not {hook!r}")
    _hooks.append(hook)
    return hook


def _terminated(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: hooks are not to be interrupted by the next
    finishes = [hook() for hook in _hooks]
    if True not in finishes:
        raise SystemExit(TERMINATED)


# ---- the environment ---------------------------------------------------------------------------------------------


def rank_of(environment: Mapping[str, str]) -> int:
    return _number(environment, *RANK_VARIABLES)


def arguments_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """The keyword arguments, from wherever they came."""
    text = environment.get("ENTRYPOINT_ARGS") or "".join(_pieces(environment, "ENTRYPOINT_ARGS")) or "{}"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise BadEnvironment(f"ENTRYPOINT_ARGS is no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadEnvironment("ENTRYPOINT_ARGS is no JSON object of keyword arguments")
    more = environment.get("REPLICA_ARGS_FILE")
    if more:
        arguments |= pickle.loads(Path(more).read_bytes())
    return arguments


def _pieces(environment: Mapping[str, str], name: str) -> list[str]:
    pieces: list[str] = []
    while (piece := environment.get(f"{name}_{len(pieces)}")) is not None:
        pieces.append(piece)
    return pieces


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = next((environment[name] for name in names if environment.get(name)), "")
    if not (text.isascii() and text.isdigit()):
        raise BadEnvironment(f"{names[0]} is {text!r}; it must be a number")
    return int(text)


# ---- the function ------------------------------------------------------------------------------------------------


def call(entrypoint: str, arguments: dict[str, Any]) -> Any:
    """Run the user's function, or a module as a program. Only a function has a result."""
    module_name, _, function_name = entrypoint.partition(":")
    sys.argv = [entrypoint]
    if not function_name:
        runpy.run_module(module_name, run_name="__main__", alter_sys=True)
        return None
    function: Any = importlib.import_module(module_name)
    for name in function_name.split("."):
        if not hasattr(function, name):
            raise AttributeError(f"ENTRYPOINT {entrypoint!r}: there is no {name!r} in it")
        function = getattr(function, name)
    if not callable(function):
        raise TypeError(f"ENTRYPOINT {entrypoint!r} is of type {type(function).__name__} and cannot be called")
    value = function(**_taken(function, arguments))
    if inspect.iscoroutine(value):
        import asyncio  # noqa: PLC0415  a replica without it starts sooner

        value = asyncio.run(value)
    return value


def _taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """All of them, apart from the rendezvous URI where the function does not ask for it: we need it, too."""
    if "rendezvous_uri" in arguments:
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # one that does not tell, written in C
            return arguments
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if "rendezvous_uri" not in parameters and not takes_all:
            return {name: value for name, value in arguments.items() if name != "rendezvous_uri"}
    return arguments


# ---- the result --------------------------------------------------------------------------------------------------


def result_key(rank: int) -> str:
    """Where in the rendezvous a replica's result is."""
    return f"results/{rank}.json"


def local_path(uri: str) -> Path | None:
    """The directory that a `file://` URI, or a plain path, names; None for another store."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if uri.startswith("/") else None


def object_store(uri: str) -> Any:
    """The object store of a URI, opened as replicas open it."""
    from basilica.diloco.stores.cloud import open_cloud  # noqa: PLC0415  only where results are kept in one

    return open_cloud(uri, {})


def store_result(environment: Mapping[str, str], rank: int, outcome: Mapping[str, Any]) -> None:
    """`outcome` has `exit_code`, and `result` or `error`."""
    file, uri = environment.get(env.RESULT_FILE), environment.get("RENDEZVOUS_URI")
    if file:
        if outcome["exit_code"] == 0:
            os.makedirs(os.path.dirname(file), exist_ok=True)
            write(file, json.dumps(outcome["result"]))
    elif uri and not uri.startswith("memory:"):
        document = json.dumps({"job": environment.get("REPLICA_JOB"), "rank": rank, **outcome})
        directory = local_path(uri)
        if directory is not None:
            path = directory / result_key(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path), document)
        else:
            from basilica.diloco.stores import open_store  # noqa: PLC0415  only where results are kept in one

            data = memoryview(document.encode())
            open_store(uri, patience=RESULT_PATIENCE).put(result_key(rank), len(data), iter([data]))


def tell_in_words(path: str, problem: str) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    write(path, f"{problem}\n")


# ---- the whole ---------------------------------------------------------------------------------------------------


def main() -> int:
    """The exit code."""
    environment = os.environ
    signal.signal(signal.SIGTERM, _terminated)
    try:
        rank, _ = rank_of(environment), _number(environment, "WORLD_SIZE")
        entrypoint = environment.get("ENTRYPOINT")
        if not entrypoint:
            raise BadEnvironment('ENTRYPOINT is not set; it names "package.module:function"')
        arguments = arguments_of(environment)
    except BadEnvironment as error:
        sys.stderr.write(f"basilica: {error}\n")
        return 2
    environment["REPLICA_RANK"] = str(rank)
    rank_env = arguments.pop("rank_env", None)
    if isinstance(rank_env, str):
        environment[rank_env] = str(rank)
    if isinstance(arguments.get("rendezvous_uri"), str):
        environment.setdefault("RENDEZVOUS_URI", arguments["rendezvous_uri"])
    return _run(environment, rank, entrypoint, arguments)


def _run(environment: Mapping[str, str], rank: int, entrypoint: str, arguments: dict[str, Any]) -> int:
    try:
        value = _as_json(call(entrypoint, arguments), entrypoint)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done: only its result is left to be stored
        store_result(environment, rank, {"exit_code": 0, "result": value})
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 0:
            store_result(environment, rank, {"exit_code": 0, "result": None})
        else:
            _told(environment, rank, code, f"exited with code {code}")
        return code
    except Exception as error:  # noqa: BLE001  whatever it was, it is told
        error.with_traceback(_without_our_frames(error))
        record(error)
        sys.excepthook(type(error), error, error.__traceback__)
        _told(environment, rank, 1, f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX])
        return 1
    return 0


def _as_json(value: Any, entrypoint: str) -> Any:
    result = plain(value, f"{entrypoint}()")
    size = len(json.dumps(result))
    if size > RESULT_MAX:
        raise ValueError(f"{entrypoint}() returned {size} bytes of JSON, more than {RESULT_MAX}")
    return result


def _told(environment: Mapping[str, str], rank: int, code: int, problem: str) -> None:
    """Write the error to every place from which it may be read; a place that cannot be written is skipped."""
    outcome = {"exit_code": code, "error": problem}
    places: list[Callable[[], None]] = [lambda: store_result(environment, rank, outcome)]
    failure_file = environment.get("REPLICA_FAILURE_FILE")
    if failure_file:
        places.append(lambda: tell_in_words(failure_file, problem))
    for tell in places:
        try:
            tell()
        except Exception as trouble:  # noqa: BLE001  the first error is the one that counts
            sys.stderr.write(f"basilica: could not store why: {trouble}\n")


def _without_our_frames(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    # The module that user code imports, not this copy of it: hooks are kept there.
    sys.exit(importlib.import_module("basilica.diloco.replica_entrypoint").main())
