"""The bootstrap of a rank that runs shipped source. Its text travels with the source: it needs no package of ours, and
only the Python that ranks may have. It has no effect on import.

`shipped` is one JSON object: `packages` for pip; then either `exec`, a command line, or `script`, a file that is here
already, or `source` with `file`, `name` and `arguments` (a literal) of the function to call, or no name for a script,
or `pickle` (base64, of the function and its arguments) with its `name` and the version of `python` that it is for.
With `torchrun`, which has its options, this process becomes a torchrun agent, whose workers run the source; `agent` and
`budget` are the texts of the hooks on it, and `handler` that of the backend by which it meets the others.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import subprocess
import sys
import tempfile
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESULT_MAX = 8 << 20


def main(shipped: dict[str, Any], worker: bool = False) -> None:
    for place in reversed(shipped.get("path", [])):
        put_on_path(place)
    if shipped.get("packages") and not worker:
        put_on_path(install(shipped["packages"]))
    if "exec" in shipped:
        replace_us([os.path.expandvars(part) for part in shipped["exec"]])
    if "torchrun" in shipped and not worker:
        script = os.path.join(scratch(), "worker.py")
        write(script, shipped["worker"])
        options = [os.path.expandvars(part) for part in shipped["torchrun"]]
        torchrun(options, script, (shipped["agent"], shipped["budget"], shipped.get("handler")))
        return
    del os.environ["BASILICA_SOURCE"]  # it is long, and child processes do not need it
    try:
        run(shipped)
    except Exception as error:  # noqa: BLE001  shown as usual, but without our own frames
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in ("<string>", "<basilica>"):
            trace = trace.tb_next
        record(error.with_traceback(trace))
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


def record(error: Exception) -> None:
    """Write the traceback to torch's error file, from which the exit of this rank is explained."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import traceback  # noqa: PLC0415  a rank without a failure starts sooner without it

    said = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    more = {"py_callstack": said, "timestamp": str(int(time.time()))}
    text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}})
    with contextlib.suppress(OSError):
        write(path, text)


def torchrun(options: list[str], script: str, texts: tuple[str, str, str | None]) -> None:
    """Be a torchrun agent, as `python -m torch.distributed.run` would, with our hooks and rendezvous backend."""
    import importlib.util  # noqa: PLC0415  only agents need these
    import runpy  # noqa: PLC0415

    if importlib.util.find_spec("torch") is None:
        sys.exit(
            f"basilica: launcher='torchrun' needs torch, which {sys.executable} does not have: install it there with "
            "'pip install torch', or deploy with pip_packages=['torch']"
        )
    agent, budget, handler = texts
    hooks = executed_text(agent, "basilica_torch_agent")
    hooks["install"](anyway=True)
    executed_text(budget, "basilica_torch_budget")["count_own_failures_only"]()
    with contextlib.suppress(ImportError):  # another torch has it elsewhere
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: PLC0415

        hooks["attach"](rendezvous_handler_registry)
        if handler is not None:
            executed_text(handler, "basilica_torch_handler")["register"]()
    sys.argv = ["torchrun", *options, script, *sys.argv[1:]]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


def executed_text(text: str, name: str) -> dict[str, Any]:
    """The names of a module of ours that travelled as a text."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, "<basilica>", "exec"), names)
    return names


def replace_us(command: list[str]) -> None:
    if command[0] == "python":
        command[0] = sys.executable
    try:
        os.execvp(command[0], command + sys.argv[1:])
    except OSError as error:
        sys.exit(f"basilica: cannot execute {command[0]}: {error.strerror}")


def put_on_path(place: str) -> None:
    """Add the directory to the path of this process and of its children."""
    sys.path.insert(0, place)
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = place + os.pathsep + rest if rest else place


def scratch() -> str:
    """Return a directory of this rank: with the run's other files, else a temporary one."""
    result = os.environ.get("BASILICA_RESULT_FILE")
    if result:
        place = os.path.splitext(result)[0] + ".files"
        with contextlib.suppress(OSError):
            os.makedirs(place, 0o700, exist_ok=True)
            return place
    return tempfile.mkdtemp(prefix="basilica-")


def install(packages: list[str]) -> str:
    """Install packages into a directory of this rank; a later attempt reuses the packages of an earlier one."""
    place = os.path.join(scratch(), "packages")
    if os.path.isdir(place):
        return place
    fresh = tempfile.mkdtemp(prefix="packages-", dir=os.path.dirname(place))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    code = subprocess.call([*pip, "--target", fresh, *packages])
    if code != 0:
        sys.exit(f"basilica: could not install {' '.join(packages)}: pip exited with code {code}")
    os.rename(fresh, place)
    return place


def write(path: str, text: str) -> None:
    """Write a file atomically: several workers of a rank write the same."""
    fd, draft = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


def run(shipped: dict[str, Any]) -> None:
    result = os.environ.get("BASILICA_RESULT_FILE") if os.environ.get("LOCAL_RANK", "0") == "0" else None
    if result:
        with contextlib.suppress(OSError):
            os.unlink(result)  # of an earlier attempt
    if "pickle" in shipped:
        function, args, kwargs = unpickled(shipped)
    else:
        names = executed(shipped)
        if "name" not in shipped:
            return
        function = names[shipped["name"]]
        args, kwargs = eval(shipped["arguments"])
    value = function(*args, **kwargs)
    if isinstance(value, types.CoroutineType):
        import asyncio  # noqa: PLC0415  a rank without it starts sooner

        value = asyncio.run(value)
    name = shipped["name"]
    text = json.dumps(plain(value, name + "()"))
    if len(text) > RESULT_MAX:
        raise ValueError(f"{name}() returned {len(text)} bytes of JSON, more than {RESULT_MAX}")
    if result:
        os.makedirs(os.path.dirname(result), exist_ok=True)
        write(result, text)


def executed(shipped: dict[str, Any]) -> dict[str, Any]:
    """The names that the source binds, as `__main__`."""
    path, source = placed(shipped)
    sys.argv[0] = path
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module.__dict__


def unpickled(shipped: dict[str, Any]) -> Any:
    """The function and its arguments."""
    here, needed = f"{sys.version_info[0]}.{sys.version_info[1]}", shipped["python"]
    if here != needed:
        sys.exit(
            f"basilica: {shipped['name']} was pickled by Python {needed}, and {sys.executable} is Python {here}: "
            f"use an image with Python {needed}, or deploy without ship='pickle'"
        )
    try:
        import cloudpickle  # noqa: PLC0415
    except ImportError:
        sys.exit(
            f"basilica: ship='pickle' needs cloudpickle, which {sys.executable} does not have: install it there with "
            "'pip install cloudpickle', or deploy with pip_packages=['cloudpickle']"
        )
    import base64  # noqa: PLC0415

    return cloudpickle.loads(base64.b64decode(shipped["pickle"]))


def placed(shipped: dict[str, Any]) -> tuple[str, str | bytes]:
    """Return the file that runs, and its content."""
    if "script" in shipped:
        path = shipped["script"]
        sys.path[0] = os.path.dirname(os.path.abspath(path))  # as if Python had been started with it
        with open(path, "rb") as file:
            return path, file.read()
    source = shipped["source"]
    try:
        path = os.path.join(scratch(), shipped["file"])
        write(path, source)
    except OSError:  # no writable directory: tracebacks still show lines, but processes cannot be spawned from it
        path = shipped["file"]
        linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    return path, source


def plain(value: Any, where: str) -> Any:
    """Return the value for JSON: arrays and tensors become lists and numbers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        for key in value:
            if key is not None and not isinstance(key, (bool, int, float, str)):
                raise TypeError(f"{where} has a key of type {type(key).__name__}, which is no JSON")
        return {key: plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    for convert in ("tolist", "item"):
        if callable(getattr(value, convert, None)):
            return plain(getattr(value, convert)(), where)
    what = f"{where} is of type {type(value).__name__}, which is no JSON: "
    raise TypeError(what + "return numbers, text, lists and dicts, and write the rest to a file")
