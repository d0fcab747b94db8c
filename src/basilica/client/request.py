"""A create request, from the words of the SDK to the wire. Pure: the caller has read environment and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from basilica.client.options import Deploy
from basilica.core.errors import ValidationError
from basilica.core.names import check_name
from basilica.core.spec import ProviderFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the ranks execute and with what, once the caller's machine has been looked at."""

    command: Sequence[str] | str
    resize: Literal["join", "restart"]
    env: Mapping[str, str]
    workdir: str | None = None
    archive: str | None = None


def to_wire(name: str, request: Deploy, program: Program) -> dict[str, Any]:
    check_name(name, "name")
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
        "resize": program.resize,
        "maxRestarts": request.max_restarts,
        "graceSeconds": request.grace_seconds,
    }
    optional = {
        "deadlineSeconds": request.deadline_seconds,
        "startDeadlineSeconds": request.start_deadline_seconds,
    }
    distributed |= {name: value for name, value in optional.items() if value is not None}
    if request.on_stall != "show":
        distributed["onStall"] = request.on_stall
    body: dict[str, Any] = {
        "instanceName": name,
        "image": request.image,
        "replicas": size.target,
        "port": request.port,
        "args": [str(part) for part in request.args],
        "env": dict(program.env),
        "secrets": dict(request.secrets),
        "resources": resources,
        "distributed": distributed,
    }
    if isinstance(program.command, str):
        distributed["command"] = program.command
    else:
        body["command"] = [str(part) for part in program.command]
    more = {"ttlSeconds": request.ttl_seconds, "workdir": program.workdir, "workdirArchive": program.archive}
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
