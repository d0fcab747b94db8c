"""The options of `deploy_distributed`: their names and types for whoever calls it, and their defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from basilica.core.errors import ValidationError
from basilica.core.spec import ProviderFilter
from basilica.core.world import WorldSize

DEPLOY_SECONDS = 600.0
BENCH_SECONDS = 1500.0
Source = Callable[..., Any] | str | Path
WaitForBench = Literal["never", "best_effort", "required"]


class DeployOptions(TypedDict, total=False):
    """The keywords of `deploy_distributed`.

    What to run is `source` (a function, the path of a script, or its text) or `command` (a list, executed as it stands,
    or a string for /bin/sh). A function gets `source_args` and `source_kwargs`, and `results()` has what it returned.
    It travels as source text, or with `ship="pickle"` as a pickle, which carries more; the ranks need cloudpickle then.
    `workdir` is shipped to a remote server; the ranks of an embedded one run where the caller is, or there.
    """

    world_size: Required[WorldSize]
    source: Source | None
    command: Sequence[str] | str | None
    source_args: Sequence[Any]
    source_kwargs: Mapping[str, Any]
    ship: Literal["source", "pickle"]
    launcher: str | None
    pip_packages: Sequence[str]
    args: Sequence[str]
    image: str
    port: int
    gpu_count: int
    gpu_models: Sequence[str]
    min_gpu_memory_gb: int | None
    cpu: str | float | None
    memory: str | None
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    nccl_env: Mapping[str, str]
    provider_filter: ProviderFilter | None
    topology_spread: str
    bench: bool | str
    bench_placement: str
    rendezvous_backend: str
    workdir: str | Path | None
    resize: Literal["join", "restart"] | None
    on_stall: Literal["show", "restart"]
    max_restarts: int
    grace_seconds: float
    ttl_seconds: float | None
    deadline_seconds: float | None
    start_deadline_seconds: float | None
    timeout: float
    wait_for_bench: WaitForBench
    bench_timeout: float
    wait: bool
    cleanup_on_failure: bool
    delete_on_exit: bool
    on_upload: Callable[[int, int], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """`DeployOptions` with its defaults, checked."""

    world_size: WorldSize
    name: str | None = None
    source: Source | None = None
    command: Sequence[str] | str | None = None
    source_args: Sequence[Any] = ()
    source_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ship: Literal["source", "pickle"] = "source"
    launcher: str | None = None
    pip_packages: Sequence[str] = ()
    args: Sequence[str] = ()
    image: str = ""
    port: int = 18789
    gpu_count: int = 1
    gpu_models: Sequence[str] = ()
    min_gpu_memory_gb: int | None = None
    cpu: str | float | None = None
    memory: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    nccl_env: Mapping[str, str] = field(default_factory=dict)
    provider_filter: ProviderFilter | None = None
    topology_spread: str = "pack"
    bench: bool | str = False
    bench_placement: str = "preferred"
    rendezvous_backend: str = "etcd-v2"
    workdir: str | Path | None = None
    resize: Literal["join", "restart"] | None = None
    on_stall: Literal["show", "restart"] = "show"
    max_restarts: int = 0
    grace_seconds: float = 10.0
    ttl_seconds: float | None = None
    deadline_seconds: float | None = None
    start_deadline_seconds: float | None = None
    timeout: float = DEPLOY_SECONDS
    wait_for_bench: WaitForBench = "never"
    bench_timeout: float = BENCH_SECONDS
    wait: bool = True
    cleanup_on_failure: bool = False
    delete_on_exit: bool = False
    on_upload: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.on_stall not in ("show", "restart"):
            raise ValidationError("on_stall", self.on_stall, "must be 'show' or 'restart'")
        if self.ship not in ("source", "pickle"):
            raise ValidationError("ship", self.ship, "must be 'source' or 'pickle'")
        if (self.source is None) == (self.command is None):
            raise ValidationError("source", self.source, "give either `source` or `command`: what the ranks shall run")
        if self.wait_for_bench not in ("never", "best_effort", "required"):
            raise ValidationError("wait_for_bench", self.wait_for_bench, "must be never, best_effort or required")


def parse_options(name: str | None, options: Mapping[str, Any]) -> Deploy:
    if "world_size" not in options:
        raise ValidationError("world_size", None, "is needed: basilica.WorldSize(min, target, max)")
    try:
        return Deploy(name=name, **options)
    except TypeError as error:
        raise TypeError(str(error).replace("Deploy.__init__()", "deploy_distributed()")) from None
