"""How a function, a script or its text reaches the ranks: the command line that they execute, and what it needs.

A function or a text travels in one environment variable, compressed, together with the bootstrap that runs it there.
A path on the same machine is executed as it stands.
"""

import base64
import inspect
import json
import os
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from basilica.core import environment as env
from basilica.core.errors import ValidationError
from basilica.rendezvous import torch_agent, torch_budget, torch_handler
from basilica.shipping.capture import capture, plain_function
from basilica.shipping.literals import a, literal
from basilica.shipping.pickled import pickled

SOURCE_VARIABLE = env.SOURCE
SOURCE_BYTES_MAX = 96_000  # compressed; as base64 it is just below what the kernel takes for one variable
# Restarts are counted in one place, by the controller: an agent whose workers fail ends, and is restarted as any rank.
TORCHRUN_RESTARTS = 0
# For agents that nobody drives: how long they wait for those that are missing, at all and once there are enough.
JOIN_SECONDS, LAST_CALL_SECONDS = 900, 30
MONITOR_SECONDS = 0.1  # how soon an agent sees that the world changes

_LOAD = (
    "import base64,json,os,zlib;"
    f"shipped=json.loads(zlib.decompress(base64.b64decode(os.environ['{SOURCE_VARIABLE}'])));"
    "bootstrap={'__name__':'basilica_bootstrap'};"
    "exec(compile(shipped['bootstrap'],'<basilica>','exec'),bootstrap);"
)
LOADER = _LOAD + "bootstrap['main'](shipped)"
WORKER = _LOAD + "bootstrap['main'](shipped,True)"
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
TORCH_AGENT, TORCH_BUDGET = Path(torch_agent.__file__), Path(torch_budget.__file__)
TORCH_HANDLER = Path(torch_handler.__file__)


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
    rendezvous_backend: str = "etcd-v2",
    pip_packages: Sequence[str] = (),
    remote: bool = False,
    workdir: Path | None = None,
    by: Literal["source", "pickle"] = "source",
) -> Shipped:
    """What ranks have to execute in order to run `source`.

    A function is called with `args` and `kwargs`; it travels `by` its source text or as a pickle. `remote`: the ranks
    do not see this machine's files, apart from what is in `workdir`, which is shipped by other means.
    """
    torchrun = _torchrun(launcher, rendezvous_backend)
    packages = _checked_packages(pip_packages)
    joins = torchrun is not None and rendezvous_backend != "static"
    resize: Literal["join", "restart"] = "join" if joins else "restart"
    what = _what(source)
    if not callable(what) and (args or kwargs):
        raise ValidationError("source_args", list(args) or dict(kwargs or {}), "only a function takes them; see `args`")
    if by == "pickle" and not callable(what):
        raise ValidationError("ship", by, "only a function travels as a pickle")
    if isinstance(what, Path):
        there = _path_there(what, remote=remote, workdir=workdir)
        if there is not None and torchrun is None:
            if packages:
                return with_packages(["python", "-u", there], packages, python=python, resize=resize)
            return Shipped([python, "-u", there], resize=resize)
        if there is not None:
            shipped = {"script": there}
        else:
            shipped = {"source": what.read_text(encoding="utf-8"), "file": what.name}
    elif isinstance(what, str):
        shipped = {"source": what, "file": "source.py"}
    elif by == "pickle":
        shipped = pickled(what, tuple(args), dict(kwargs or {}))
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
    if torchrun is not None:
        payload |= {"torchrun": torchrun, "worker": WORKER}
        payload |= {"agent": TORCH_AGENT.read_text("utf-8"), "budget": TORCH_BUDGET.read_text("utf-8")}
        if rendezvous_backend == "etcd-v2":  # it travels, so that ranks need neither basilica nor python-etcd
            payload["handler"] = TORCH_HANDLER.read_text(encoding="utf-8")
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


def torchrun_options(backend: str, given: Sequence[str] = ()) -> list[str]:
    """torchrun's options; the script comes after them. The user's own are last, and torchrun takes the last word.

    `--rdzv-conf` is one value, of which the last replaces the others: where the user gives one, ours is left out.
    """
    elastic = [f"--nnodes=${env.WORLD_MIN}:${env.WORLD_MAX}"]
    match backend:
        case "etcd-v2":  # torch's own `etcd-v2` is another handler, which fails on a fresh etcd
            ours = f"--rdzv-backend={torch_handler.NAME}"
            meeting = [*elastic, ours, f"--rdzv-endpoint=${env.RENDEZVOUS_ENDPOINT}"]
            conf = f"timeout={JOIN_SECONDS},last_call_timeout={LAST_CALL_SECONDS}"
        case "c10d":
            meeting = [*elastic, "--rdzv-backend=c10d", "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"]
            conf = f"join_timeout={JOIN_SECONDS},last_call_timeout={LAST_CALL_SECONDS}"
        case "static":
            meeting = ["--nnodes=$WORLD_SIZE", "--rdzv-backend=static", f"--node-rank=${env.RANK}"]
            meeting += ["--master-addr=$MASTER_ADDR", "--master-port=$MASTER_PORT"]
            conf = f"timeout={JOIN_SECONDS}"
        case _:
            raise ValidationError("rendezvous_backend", backend, "must be 'etcd-v2', 'c10d' or 'static'")
    options = [*meeting, f"--rdzv-id=${env.RENDEZVOUS_ID}", f"--nproc-per-node=${env.GPUS_PER_POD}"]
    options += [f"--max-restarts={TORCHRUN_RESTARTS}", f"--monitor-interval={MONITOR_SECONDS}"]
    if not any(option.replace("_", "-").partition("=")[0] == "--rdzv-conf" for option in given):
        options.append(f"--rdzv-conf={conf}")
    return [*options, *given]


def _torchrun(launcher: str | None, backend: str) -> list[str] | None:
    """torchrun's options, None if it is not the launcher."""
    try:
        name, *given = shlex.split(launcher) if launcher is not None else ["python"]
    except ValueError:
        name, given = "", []
    if name == "torchrun":
        return torchrun_options(backend, given)
    if name != "python" or given:
        raise ValidationError("launcher", launcher, "must be 'python' or 'torchrun', which may have options after it")
    return None


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
            problem += ", or deploy with ship='pickle' if it can be pickled"
            raise ValidationError(where, value, problem)
    return literal((args, kwargs)) or ""
