"""What the user wants: one value, validated when it is made, with a generation that counts its changes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from basilica.core.errors import ValidationError
from basilica.core.names import check_name
from basilica.core.world import WorldSize

GRACE_SECONDS = 10.0
ENV_BYTES_MAX = 1 << 20
SCRIPT_BYTES_MAX = 1 << 20
LABEL_BYTES_MAX = 4096
ARG_BYTES_MAX = 128 << 10  # the kernel takes no longer single argument or variable
SECONDS_MAX = 10 * 365 * 86400.0

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Wanted(StrEnum):
    """What the user wants of the run as a whole; it only ever moves downwards."""

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
    count: int = 0
    models: tuple[str, ...] = ()
    min_memory_gb: int | None = None

    @property
    def demanding(self) -> bool:
        """True if a particular GPU is asked for: then a machine without it will not do."""
        return bool(self.models) or self.min_memory_gb is not None


@dataclass(frozen=True, slots=True)
class Resources:
    """Per rank. None: no limit."""

    cpu: float | None = None
    memory_bytes: int | None = None
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
    is a directory in there.
    """

    name: str
    program: Shell | Exec
    world: WorldSize
    wanted: Wanted = Wanted.RUN
    generation: int = 1
    gang: int = 0
    image: str = ""
    port: int = 18789
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    nccl_env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    archive: str | None = None
    rendezvous_backend: Literal["etcd-v2", "c10d", "static"] = "etcd-v2"
    rendezvous_port: int | None = None
    provider_filter: ProviderFilter = ProviderFilter()
    topology_spread: Literal["pack", "provider-aware", "region-aware", "none"] = "pack"
    bench: BenchOnStart | None = None
    resize: Literal["join", "restart"] = "join"
    on_stall: Literal["show", "restart"] = "show"
    max_restarts: int = 0
    grace_seconds: float = GRACE_SECONDS
    ttl_seconds: float | None = None
    deadline_seconds: float | None = None
    start_deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_program(self.program)
        _check_env(self.env, "env")
        _check_env(self.secrets, "secrets")
        _check_env(self.nccl_env, "distributed.nccl.env")
        _check_range(self.port, "port", 1, 65535)
        if self.rendezvous_port is not None:
            _check_range(self.rendezvous_port, "distributed.rendezvous.port", 1, 65535)
        _check_range(self.max_restarts, "distributed.maxRestarts", 0, 1_000_000)
        _check_range(self.grace_seconds, "distributed.graceSeconds", 0, 86400)
        for value, name in (
            (self.ttl_seconds, "ttlSeconds"),
            (self.deadline_seconds, "distributed.deadlineSeconds"),
            (self.start_deadline_seconds, "distributed.startDeadlineSeconds"),
        ):
            if value is not None:
                _check_range(value, name, 0, SECONDS_MAX)
        _check_resources(self.resources)
        _check_text(self.image, "image", LABEL_BYTES_MAX)
        for label in (*self.resources.gpus.models, *self.provider_filter.include, *self.provider_filter.exclude):
            _check_text(label, "a GPU model or provider", LABEL_BYTES_MAX)
        _check_workdir(self.workdir, self.archive)

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


def _check_program(program: Shell | Exec) -> None:
    match program:
        case Shell(script, args):
            if not script.strip():
                raise ValidationError("distributed.command", script, "there is nothing to run")
            _check_text(script, "distributed.command", SCRIPT_BYTES_MAX)
        case Exec(args):
            if not args or not args[0]:
                raise ValidationError("command", list(args), "there is nothing to run")
    for arg in args:
        _check_text(arg, "args")


def check_command(argv: Sequence[str]) -> None:
    """`ValidationError` unless the kernel could execute it."""
    _check_program(Exec(tuple(argv)))


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
        raise ValidationError("workdirArchive", archive[:80], "must be the SHA-256 of an archive, in hexadecimal")
    if workdir is None:
        return
    _check_text(workdir, "workdir")
    if archive is None and not workdir.startswith("/"):
        raise ValidationError("workdir", workdir, "must be an absolute path")
    if archive is not None and (workdir.startswith("/") or ".." in workdir.split("/")):
        raise ValidationError("workdir", workdir, "must be a path within the archive")


def _check_range(value: float, where: str, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ValidationError(where, value, f"must be within {low:g}..{high:g}")


def _check_resources(resources: Resources) -> None:
    if resources.cpu is not None:
        _check_range(resources.cpu, "resources.cpu", 0.001, 100_000)
    if resources.memory_bytes is not None:
        _check_range(resources.memory_bytes, "resources.memory", 1 << 20, 1 << 60)
    _check_range(resources.gpus.count, "resources.gpus.count", 0, 1024)
    if resources.gpus.min_memory_gb is not None:
        _check_range(resources.gpus.min_memory_gb, "resources.gpus.minGpuMemoryGb", 1, 100_000)
