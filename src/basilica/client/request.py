"""A create request, from the words of the SDK to the wire. Pure: the caller has read environment and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from basilica.core.errors import ValidationError
from basilica.core.names import check_name
from basilica.core.spec import ProviderFilter
from basilica.core.world import WorldSize

Placement = Literal["preferred", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Everything that `deploy_distributed` takes, apart from how long to wait."""

    name: str
    command: Sequence[str] | str
    world_size: WorldSize
    resize: Literal["join", "restart"] = "join"
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
    args: Sequence[str] = ()
    workdir: str | None = None
    archive: str | None = None
    max_restarts: int = 0
    grace_seconds: float = 10.0
    ttl_seconds: float | None = None
    deadline_seconds: float | None = None
    start_deadline_seconds: float | None = None


def to_wire(request: RunRequest) -> dict[str, Any]:
    check_name(request.name, "name")
    size = request.world_size
    filter_ = request.provider_filter or ProviderFilter()
    gpus: dict[str, Any] = {"count": request.gpu_count, "model": list(request.gpu_models)}
    if request.min_gpu_memory_gb is not None:
        gpus["minGpuMemoryGb"] = request.min_gpu_memory_gb
    resources: dict[str, Any] = {"gpus": gpus}
    if request.cpu is not None:
        resources["cpu"] = str(request.cpu)
    if request.memory is not None:
        resources["memory"] = request.memory
    distributed: dict[str, Any] = {
        "enabled": True,
        "worldSize": {"min": size.min, "target": size.target, "max": size.max},
        "rendezvous": {"backend": request.rendezvous_backend},
        "providerFilter": {"include": list(filter_.include), "exclude": list(filter_.exclude)},
        "topologySpread": {"strategy": request.topology_spread},
        "nccl": {"env": dict(request.nccl_env)},
        "bench": _bench(request.bench, request.bench_placement),
        "resize": request.resize,
        "maxRestarts": request.max_restarts,
        "graceSeconds": request.grace_seconds,
    }
    optional = {
        "deadlineSeconds": request.deadline_seconds,
        "startDeadlineSeconds": request.start_deadline_seconds,
    }
    distributed |= {name: value for name, value in optional.items() if value is not None}
    body: dict[str, Any] = {
        "instanceName": request.name,
        "image": request.image,
        "replicas": size.target,
        "port": request.port,
        "args": [str(part) for part in request.args],
        "env": dict(request.env),
        "secrets": dict(request.secrets),
        "resources": resources,
        "distributed": distributed,
    }
    if isinstance(request.command, str):
        distributed["command"] = request.command
    else:
        body["command"] = [str(part) for part in request.command]
    more = {"ttlSeconds": request.ttl_seconds, "workdir": request.workdir, "workdirArchive": request.archive}
    return body | {name: value for name, value in more.items() if value is not None}


def _bench(bench: bool | str, placement: str) -> dict[str, str]:
    """True, False, "on-start" or "off". With the bench off its placement is ignored, whatever it says."""
    if bench is False or bench == "off":
        return {"mode": "off"}
    if bench is not True and bench != "on-start":
        raise ValidationError("bench", bench, "must be True, False, 'on-start' or 'off'")
    if placement not in ("preferred", "strict"):
        raise ValidationError("bench_placement", placement, "must be 'preferred' or 'strict'")
    return {"mode": "on-start", **({"placement": "strict"} if placement == "strict" else {})}
