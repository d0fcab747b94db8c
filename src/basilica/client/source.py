"""How a function, a script or its text reaches the ranks: the command line that they execute, and what it needs.

A function or a text travels in one environment variable, compressed, together with the bootstrap that runs it there.
A path on the same machine is executed as it stands.
"""

import base64
import inspect
import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from basilica.client.capture import a, capture, literal, plain_function
from basilica.core.errors import ValidationError

SOURCE_VARIABLE = "BASILICA_SOURCE"
SOURCE_BYTES_MAX = 96_000  # compressed; as base64 it is just below what the kernel takes for one variable
TORCHRUN_RESTARTS = 10

_LOAD = (
    "import base64,json,os,zlib;"
    f"shipped=json.loads(zlib.decompress(base64.b64decode(os.environ['{SOURCE_VARIABLE}'])));"
    "bootstrap={'__name__':'basilica_bootstrap'};"
    "exec(compile(shipped['bootstrap'],'<basilica>','exec'),bootstrap);"
)
LOADER = _LOAD + "bootstrap['main'](shipped)"
WORKER = _LOAD + "bootstrap['main'](shipped,True)"
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


@dataclass(frozen=True, slots=True)
class Shipped:
    """What ranks execute. `resize`: whether ranks of a running gang can stay when its size changes."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    resize: Literal["join", "restart"] = "restart"


def ship(
    source: Callable[..., Any] | str | Path | None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    python: str = "python3",
    launcher: str | None = None,
    pip_packages: Sequence[str] = (),
    remote: bool = False,
    workdir: Path | None = None,
) -> Shipped:
    """What ranks have to execute in order to run `source`.

    A function is called with `args` and `kwargs`. `remote`: the ranks do not see this machine's files, apart from what
    is in `workdir`, which is shipped by other means.
    """
    if launcher not in (None, "python", "torchrun"):
        raise ValidationError("launcher", launcher, "must be 'python' or 'torchrun'")
    torchrun = launcher == "torchrun"
    packages = _checked_packages(pip_packages)
    resize: Literal["join", "restart"] = "join" if torchrun else "restart"
    what = _what(source)
    if not callable(what) and (args or kwargs):
        raise ValidationError("source_args", list(args) or dict(kwargs or {}), "only a function takes them; see `args`")
    if isinstance(what, Path):
        there = _path_there(what, remote=remote, workdir=workdir)
        if there is not None:
            command = [*torchrun_line("python" if packages else python), there] if torchrun else [python, "-u", there]
            if packages:
                return with_packages(["python", *command[1:]], packages, python=python, resize=resize)
            return Shipped(command, resize=resize)
        shipped = {"source": what.read_text(encoding="utf-8"), "file": what.name}
    elif isinstance(what, str):
        shipped = {"source": what, "file": "source.py"}
    else:
        captured = capture(what)
        shipped = {
            "source": captured.text,
            "file": captured.file,
            "name": captured.name,
            "arguments": _arguments(what, tuple(args), dict(kwargs or {})),
        }
    payload: dict[str, Any] = {**shipped, "packages": packages}
    if callable(what) and not remote:
        payload["path"] = [os.path.abspath(place) for place in sys.path[:1]]  # where its script finds its own modules
    if torchrun:
        payload |= {"launcher": torchrun_line("python"), "worker": WORKER}
    return _packed(payload, python, resize)


def with_packages(
    argv: Sequence[str],
    pip_packages: Sequence[str],
    *,
    python: str = "python3",
    resize: Literal["join", "restart"] = "restart",
) -> Shipped:
    """A command that is executed once the packages are installed. A first word `python` means the installing one."""
    return _packed({"exec": list(argv), "packages": _checked_packages(pip_packages)}, python, resize)


def torchrun_line(python: str) -> list[str]:
    """torchrun with its options, as the module that it is; the script comes after it."""
    return [
        python,
        "-u",
        "-m",
        "torch.distributed.run",
        "--nnodes=$BASILICA_WORLD_MIN:$BASILICA_WORLD_MAX",
        "--nproc-per-node=$BASILICA_GPUS_PER_POD",
        "--rdzv-backend=etcd",
        "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT",
        "--rdzv-id=$BASILICA_RDZV_ID",
        f"--max-restarts={TORCHRUN_RESTARTS}",
    ]


def _packed(payload: Mapping[str, Any], python: str, resize: Literal["join", "restart"]) -> Shipped:
    whole = {"bootstrap": BOOTSTRAP.read_text(encoding="utf-8"), **payload}
    packed = zlib.compress(json.dumps(whole).encode(), 9)
    if len(packed) > SOURCE_BYTES_MAX:
        problem = f"is {len(packed)} bytes even when compressed, and at most {SOURCE_BYTES_MAX} travel with the request"
        raise ValidationError("source", payload.get("file"), f"{problem}; ship files with workdir=")
    env = {SOURCE_VARIABLE: base64.b64encode(packed).decode()}
    return Shipped([python, "-u", "-c", LOADER], env, resize)


def _what(source: object) -> Callable[..., Any] | str | Path:
    """A function, an existing file, or text."""
    if callable(source):
        return source
    if isinstance(source, str):
        if "\n" in source:
            return source
        if not source.strip():
            raise ValidationError("source", source, "there is nothing to run")
        if not source.endswith(".py") and not os.path.exists(source):
            try:
                compile(source, "source", "exec")
            except (SyntaxError, ValueError):
                problem = "is neither an existing file nor Python source"
                raise ValidationError("source", source, problem) from None
            return source
        source = Path(source)
    if not isinstance(source, Path):
        raise ValidationError("source", source, f"is {a(source)}; give a function, the path of a script, or its text")
    if not source.exists():
        raise ValidationError("source", str(source), f"there is no such file (in {Path.cwd()})")
    if not source.is_file():
        raise ValidationError("source", str(source), "is not a file; ship a directory with workdir=")
    return source


def _path_there(path: Path, *, remote: bool, workdir: Path | None) -> str | None:
    """What the ranks call the file; None if they do not have it."""
    if not remote:
        return str(path.absolute())
    if workdir is not None and path.resolve().is_relative_to(workdir.resolve()):
        return str(path.resolve().relative_to(workdir.resolve()))
    return None


def _checked_packages(packages: Sequence[str]) -> list[str]:
    if isinstance(packages, str) or not all(isinstance(p, str) and p.strip() for p in packages):
        raise ValidationError("pip_packages", packages, "must be a list of what pip takes, such as ['einops>=0.8']")
    return list(packages)


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments as source text. Plain data only; what cannot travel is refused with its name."""
    plain = plain_function(function)
    signature = inspect.signature(plain)
    if function is plain:  # a decorator may take others
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValidationError("source_args", [*args, *kwargs], f"{plain.__name__}: {error}") from None
    names = [*signature.parameters, *(f"#{number}" for number in range(len(args)))]
    given = [("source_args", *pair) for pair in zip(names, args, strict=False)]
    given += [("source_kwargs", *pair) for pair in kwargs.items()]
    for where, name, value in given:
        if literal(value) is None:
            problem = f"the argument {name!r} ({a(value)}) cannot travel; pass plain data and make it from that"
            raise ValidationError(where, value, problem)
    return literal((args, kwargs)) or ""
