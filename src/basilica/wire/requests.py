"""Requests, as the official client sends them and with our additions, and their way into the core."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field
from pydantic import ValidationError as PydanticError

from basilica.core.errors import ValidationError
from basilica.core.names import NAME_MAX
from basilica.core.quantities import parse_cpu, parse_memory
from basilica.core.spec import BenchOnStart, DeploymentSpec, Exec, Gpus, ProviderFilter, Resources, Shell
from basilica.core.world import WorldSize
from basilica.wire.base import Incoming

U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
EnvMap = dict[str, str]
NAME_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"  # for the OpenAPI document; the core checks it, with a hint
Body = TypeVar("Body", bound=Incoming)


class WorldSizeBody(Incoming):
    min: U32
    target: U32
    max: U32


class RendezvousBody(Incoming):
    backend: Literal["etcd-v2", "c10d", "static"] = "etcd-v2"
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class ProviderFilterBody(Incoming):
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class TopologySpreadBody(Incoming):
    strategy: Literal["pack", "provider-aware", "region-aware", "none"] = "pack"


class NcclBody(Incoming):
    env: EnvMap = Field(default_factory=dict)


class BenchBody(Incoming):
    mode: Literal["off", "on-start"] = "off"
    placement: str | None = None


class GpusBody(Incoming):
    count: U32 = 0
    model: tuple[str, ...] = ()
    min_gpu_memory_gb: U32 | None = None


class ResourcesBody(Incoming):
    cpu: str | None = None
    memory: str | None = None
    gpus: GpusBody | None = None


class DistributedBody(Incoming):
    """The gang. `command` is a script for /bin/sh; without it the top-level `command` list is executed as it stands."""

    enabled: bool = True
    world_size: WorldSizeBody
    command: str | None = None
    rendezvous: RendezvousBody = RendezvousBody()
    provider_filter: ProviderFilterBody = ProviderFilterBody()
    topology_spread: TopologySpreadBody = TopologySpreadBody()
    nccl: NcclBody = NcclBody()
    bench: BenchBody = BenchBody()
    resize: Literal["join", "restart"] = "join"
    on_stall: Literal["show", "restart"] = "show"
    max_restarts: U32 = 0
    grace_seconds: Seconds = 10.0
    deadline_seconds: Seconds | None = None
    start_deadline_seconds: Seconds | None = None


class CreateDeployment(Incoming):
    """`POST /deployments`. Without `distributed`, a gang of `replicas` equal processes."""

    instance_name: Annotated[str, Field(json_schema_extra={"pattern": NAME_PATTERN, "maxLength": NAME_MAX})]
    image: str = ""
    replicas: U32 = 1
    port: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": 65535})] = 18789
    command: list[str] | None = None
    args: list[str] | None = None
    env: EnvMap | None = None
    secrets: EnvMap | None = None
    workdir: str | None = None
    workdir_archive: Annotated[str | None, Field(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})] = None
    resources: ResourcesBody | None = None
    ttl_seconds: Seconds | None = None
    volumes: list[dict[str, object]] | None = None
    enable_billing: bool = True
    distributed: DistributedBody | None = None


class ScaleBody(Incoming):
    target: U32


class ExecBody(Incoming):
    rank: U32 = 0
    command: Annotated[list[str], Field(min_length=1)]


class EnrollBody(Incoming):
    enabled: bool


class Nothing(Incoming):
    """A body without meaning: `{}` or none at all."""


def parse(model: type[Body], raw: bytes) -> Body:
    """A request's body, or `ValidationError` with the field's path, its value and the problem."""
    try:
        return model.model_validate_json(raw)
    except PydanticError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        value = "?" if _private(field) else _shown(first.get("input"))
        raise ValidationError(field, value, first["msg"]) from None


def to_spec(body: CreateDeployment) -> DeploymentSpec:
    """The core's spec of a create request; every rule that the types do not tell is checked there."""
    if body.volumes:
        raise ValidationError("volumes", f"{len(body.volumes)} of them", "are not supported by this server")
    gang = body.distributed if body.distributed and body.distributed.enabled else _gang_of(body.replicas)
    size = gang.world_size
    return DeploymentSpec(
        name=body.instance_name,
        program=_program(body, gang),
        world=WorldSize(size.min, size.target, size.max),
        image=body.image,
        port=body.port,
        resources=_resources(body.resources or ResourcesBody()),
        env=body.env or {},
        secrets=body.secrets or {},
        nccl_env=gang.nccl.env,
        workdir=body.workdir,
        archive=body.workdir_archive,
        rendezvous_backend=gang.rendezvous.backend,
        rendezvous_port=gang.rendezvous.port,
        provider_filter=ProviderFilter(gang.provider_filter.include, gang.provider_filter.exclude),
        topology_spread=gang.topology_spread.strategy,
        bench=_bench(gang.bench),
        resize=gang.resize,
        on_stall=gang.on_stall,
        max_restarts=gang.max_restarts,
        grace_seconds=gang.grace_seconds,
        ttl_seconds=body.ttl_seconds or None,
        deadline_seconds=gang.deadline_seconds or None,
        start_deadline_seconds=gang.start_deadline_seconds or None,
    )


def _gang_of(replicas: int) -> DistributedBody:
    return DistributedBody.model_validate({"worldSize": dict.fromkeys(("min", "target", "max"), replicas)})


def _program(body: CreateDeployment, gang: DistributedBody) -> Shell | Exec:
    if gang.command is not None and gang.command != "auto":
        return Shell(gang.command, (*(body.command or ()), *(body.args or ())))
    if body.command:
        return Exec((*body.command, *(body.args or ())))
    problem = "there is nothing to run: give a command (an image's own entrypoint is not known here)"
    raise ValidationError("distributed.command", gang.command, problem)


def _resources(body: ResourcesBody) -> Resources:
    gpus = body.gpus or GpusBody()
    return Resources(
        cpu=None if body.cpu is None else parse_cpu(body.cpu, "resources.cpu"),
        memory_bytes=None if body.memory is None else parse_memory(body.memory, "resources.memory"),
        gpus=Gpus(gpus.count, gpus.model, gpus.min_gpu_memory_gb),
    )


def _bench(body: BenchBody) -> BenchOnStart | None:
    """With the bench off its placement is ignored, whatever it says."""
    if body.mode == "off":
        return None
    match body.placement:
        case None | "preferred":
            return BenchOnStart("preferred")
        case "strict":
            return BenchOnStart("strict")
        case other:
            raise ValidationError("distributed.bench.placement", other, "must be 'preferred' or 'strict'")


def _private(field: str) -> bool:
    return field.startswith(("env", "secrets", "distributed.nccl")) or field == "body"


def _shown(value: object) -> object:
    """Single values only: an object or a list may hold what nobody but its sender should see."""
    short = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 200)
    return value if short or value is None else type(value).__name__
