"""The spec: the user's wish as one value, validated when it is made, with a generation that counts its changes.

A `ValidationError` names the attribute, dotted (`resources.gpus.count`). What it is called in a body or among the
keywords of the SDK is a matter of `wire.spec`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from basilica.core.errors import ValidationError
from basilica.core.names import check_name
from basilica.core.resume import parse_resume
from basilica.core.world import WorldSize

GRACE_SECONDS = 10.0
NOTICE_SECONDS = 30.0
ENV_BYTES_MAX = 1 << 20
SCRIPT_BYTES_MAX = 1 << 20
LABEL_BYTES_MAX = 4096
ARG_BYTES_MAX = 128 << 10  # the kernel takes no longer single argument or variable
SECONDS_MAX = 10 * 365 * 86400.0

DIGEST_PATTERN = "^[0-9a-f]{64}$"

URI_SCHEMES = ("s3", "gs", "az", "file")
URI_PATTERN = f"^({'|'.join(URI_SCHEMES)})://.+"

_URI = re.compile(r"([a-z0-9]+)://([^/?#\s]*)(/[^?#\s]*)?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_DIGEST = re.compile(DIGEST_PATTERN)


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the most that a number may be; it stands in the type of an attribute, and every schema tells it."""

    low: float
    high: float

    def __str__(self) -> str:
        return "..".join(str(int(end)) if end == int(end) else str(end) for end in (self.low, self.high))


PORTS = Range(1, 65535)
DURATION = Range(0, SECONDS_MAX)


class Wanted(StrEnum):
    """The wanted fate of the run as a whole; it only ever moves downwards."""

    RUN = "run"
    CANCEL = "cancel"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Shell:
    """A script for /bin/sh, with `args` as $1…"""

    script: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exec:
    """A program and its arguments, executed as they stand."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpus:
    count: Annotated[int, Range(0, 1024)] = 0
    models: tuple[str, ...] = ()
    min_memory_gb: Annotated[int, Range(1, 100_000)] | None = None

    @property
    def demanding(self) -> bool:
        """True if a particular GPU is asked for: then a machine without it will not do."""
        return bool(self.models) or self.min_memory_gb is not None


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of each rank. None: no limit."""

    cpu: Annotated[float, Range(0.001, 100_000)] | None = None
    memory_bytes: Annotated[int, Range(1 << 20, 1 << 60)] | None = None
    gpus: Gpus = Gpus()


@dataclass(frozen=True, slots=True)
class BenchOnStart:
    placement: Literal["preferred", "strict"] = "preferred"


@dataclass(frozen=True, slots=True)
class ProviderFilter:
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """One training run as it is wanted.

    Only `world`, `wanted` and `gang` change during its life, and each change is a generation. `gang` counts how
    often the user asked for a fresh start of all ranks. With an `archive`, ranks run in what it holds, and `workdir`
    is a directory in there. `resume_from` is `RUN` or `RUN@STEP`; in a stored spec, RUN is an instance.
    """

    name: str
    program: Shell | Exec
    world: WorldSize
    wanted: Wanted = Wanted.RUN
    generation: int = 1
    gang: int = 0
    image: str = ""
    port: Annotated[int, PORTS] = 18789
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    nccl_env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    archive: str | None = None
    rendezvous_backend: Literal["etcd-v2", "c10d", "static"] = "etcd-v2"
    rendezvous_port: Annotated[int, PORTS] | None = None
    provider_filter: ProviderFilter = ProviderFilter()
    topology_spread: Literal["pack", "provider-aware", "region-aware", "none"] = "pack"
    bench: BenchOnStart | None = None
    resize: Literal["join", "restart"] = "join"
    on_stall: Literal["show", "restart"] = "show"
    max_restarts: Annotated[int, Range(0, 1_000_000)] = 0
    grace_seconds: Annotated[float, Range(0, 86400)] = GRACE_SECONDS
    notice_seconds: Annotated[float, Range(0, 86400)] = NOTICE_SECONDS
    notice_signal: Literal["SIGUSR1", "SIGUSR2"] | None = None
    ttl_seconds: Annotated[float, DURATION] | None = None
    deadline_seconds: Annotated[float, DURATION] | None = None
    start_deadline_seconds: Annotated[float, DURATION] | None = None
    checkpoint_uri: str | None = None
    resume_from: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_program(self.program)
        for name in ("env", "secrets", "nccl_env"):
            _check_env(getattr(self, name), name)
        kind: type = type(self)
        for name, limits in ranges(kind):
            value = attrgetter(name)(self)
            if value is not None and not limits.low <= value <= limits.high:  # false for NaN too
                raise ValidationError(name, value, f"must be within {limits}")
        _check_text(self.image, "image", LABEL_BYTES_MAX)
        for name in ("resources.gpus.models", "provider_filter.include", "provider_filter.exclude"):
            for label in attrgetter(name)(self):
                _check_text(label, name, LABEL_BYTES_MAX)
        _check_workdir(self.workdir, self.archive)
        if self.checkpoint_uri is not None:
            _check_uri(self.checkpoint_uri)
        if self.resume_from is not None:
            parse_resume(self.resume_from)

    def scaled(self, target: int) -> "DeploymentSpec":
        return replace(self, world=self.world.scaled(target), generation=self.generation + 1)

    def restarted(self) -> "DeploymentSpec":
        return replace(self, gang=self.gang + 1, generation=self.generation + 1)

    def ended_by(self, wanted: Wanted) -> "DeploymentSpec":
        """The spec after a cancel or delete; asking for what is already asked for changes nothing."""
        order = list(Wanted)
        if order.index(wanted) <= order.index(self.wanted):
            return self
        return replace(self, wanted=wanted, generation=self.generation + 1)


@cache
def ranges(spec: type) -> tuple[tuple[str, Range], ...]:
    """Every attribute with limits, dotted, with them."""
    return tuple(_ranges(spec, ""))


def _ranges(owner: type, prefix: str) -> Iterator[tuple[str, Range]]:
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _ranges(hint, f"{prefix}{name}.")
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Annotated:
                yield from ((prefix + name, extra) for extra in part.__metadata__ if isinstance(extra, Range))


def _check_program(program: Shell | Exec) -> None:
    match program:
        case Shell(script, args):
            if not script.strip():
                raise ValidationError("program.script", script, "there is nothing to run")
            _check_text(script, "program.script", SCRIPT_BYTES_MAX)
            for arg in args:
                _check_text(arg, "program.args")
        case Exec(argv):
            check_command(argv, "program.argv")


def check_command(argv: Sequence[str], where: str = "command") -> None:
    """`ValidationError` unless the kernel could execute it."""
    if not argv or not argv[0]:
        raise ValidationError(where, list(argv), "there is nothing to run")
    for arg in argv:
        _check_text(arg, where)


def _check_env(env: Mapping[str, str], where: str) -> None:
    size = 0
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise ValidationError(where, name, "a variable's name is letters, digits and '_', and no digit first")
        _check_text(value, f"{where}.{name}", show=False)
        size += len(name.encode()) + len(value.encode()) + 2
        if size > ENV_BYTES_MAX:
            raise ValidationError(where, f"{len(env)} variables", f"together at most {ENV_BYTES_MAX} bytes")


def _check_text(text: str, where: str, limit: int = ARG_BYTES_MAX, *, show: bool = True) -> None:
    """What the kernel gets must be encodable, without NUL, and not too long. A variable's value is not echoed."""
    shown = text if show else f"{len(text)} characters"
    if "\0" in text:
        raise ValidationError(where, shown, "holds a NUL character")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValidationError(where, shown, "is not valid Unicode text") from None
    if size >= limit:
        raise ValidationError(where, f"{size} bytes", f"is longer than {limit} bytes")


def _check_workdir(workdir: str | None, archive: str | None) -> None:
    if archive is not None and not _DIGEST.fullmatch(archive):
        raise ValidationError("archive", archive[:80], "must be the SHA-256 of an archive, in hexadecimal")
    if workdir is None:
        return
    _check_text(workdir, "workdir")
    if archive is None and not workdir.startswith("/"):
        raise ValidationError("workdir", workdir, "must be an absolute path")
    if archive is not None and (workdir.startswith("/") or ".." in workdir.split("/")):
        raise ValidationError("workdir", workdir, "must be a path within the archive")


def _check_uri(uri: str) -> None:
    """A bucket with a prefix, or an absolute directory; no user, password or query, which would show in a listing."""
    _check_text(uri, "checkpoint_uri", LABEL_BYTES_MAX)
    found = _URI.fullmatch(uri)
    if found is None or found[1] not in URI_SCHEMES or "@" in found[2]:
        schemes = ", ".join(f"{scheme}://" for scheme in URI_SCHEMES)
        raise ValidationError("checkpoint_uri", uri, f"must be the URL of a bucket or directory: one of {schemes}")
    if found[1] == "file" and (found[2] or not (found[3] or "").strip("/")):
        raise ValidationError("checkpoint_uri", uri, "must name an absolute directory: file:///DIRECTORY")
    if found[1] != "file" and not found[2]:
        raise ValidationError("checkpoint_uri", uri, f"must name a bucket: {found[1]}://BUCKET/PREFIX")
