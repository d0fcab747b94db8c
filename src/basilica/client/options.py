"""The options of `deploy_distributed`: their names, types and defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from basilica.core.errors import ValidationError
from basilica.core.spec import ProviderFilter
from basilica.core.world import WorldSize
from basilica.wire.spec import TABLE, Option, keywords

DEPLOY_SECONDS = 600.0
BENCH_SECONDS = 1500.0
GPU_COUNT = 1  # of each rank, by default: most programs here are written for GPUs
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
    notice_seconds: float
    notice_signal: Literal["SIGUSR1", "SIGUSR2"] | None
    ttl_seconds: float | None
    deadline_seconds: float | None
    start_deadline_seconds: float | None
    checkpoint_uri: str | None
    resume_from: str | None
    timeout: float
    wait_for_bench: WaitForBench
    bench_timeout: float
    wait: bool
    cleanup_on_failure: bool
    delete_on_exit: bool
    on_upload: Callable[[int, int], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """One call: `run` has the keywords that are options of the run itself, and the rest is the SDK's own."""

    run: Mapping[str, Any] = field(repr=False)  # may contain secrets
    name: str | None = None
    source: Source | None = None
    command: Sequence[str] | str | None = None
    source_args: Sequence[Any] = ()
    source_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ship: Literal["source", "pickle"] = "source"
    launcher: str | None = None
    pip_packages: Sequence[str] = ()
    workdir: str | Path | None = None
    timeout: float = DEPLOY_SECONDS
    wait_for_bench: WaitForBench = "never"
    bench_timeout: float = BENCH_SECONDS
    wait: bool = True
    cleanup_on_failure: bool = False
    delete_on_exit: bool = False
    on_upload: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.ship not in ("source", "pickle"):
            raise ValidationError("ship", self.ship, "must be 'source' or 'pickle'")
        if (self.source is None) == (self.command is None):
            raise ValidationError("source", self.source, "give either `source` or `command`: what the ranks shall run")
        if self.wait_for_bench not in ("never", "best_effort", "required"):
            raise ValidationError("wait_for_bench", self.wait_for_bench, "must be never, best_effort or required")


OWN = frozenset(own.name for own in fields(Deploy)) - {"run"}


def parse_options(name: str | None, options: Mapping[str, Any], table: Sequence[Option] = TABLE) -> Deploy:
    if "world_size" not in options:
        raise ValidationError("world_size", None, "is needed: basilica.WorldSize(min, target, max)")
    of_run = keywords(table) - OWN
    run = {keyword: value for keyword, value in options.items() if keyword in of_run and value is not None}
    own = {keyword: value for keyword, value in options.items() if keyword not in of_run}
    try:
        return Deploy(run={"gpu_count": GPU_COUNT} | run, name=name, **own)
    except TypeError as error:
        raise TypeError(str(error).replace("Deploy.__init__()", "deploy_distributed()")) from None
