"""A run as the custom resource `UserDeployment`: its names in the API, and its spec to and from the core's.

The spec of the resource is the body of `POST /deployments`, field for field, with three differences: the name is the
object's own unless `name` says otherwise, secrets are a reference to a Secret, and what the API has a route for
(cancel, restart) is a field that only ever goes one way. Deleting is Kubernetes' own.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from basilica.core.errors import ValidationError
from basilica.core.quantities import format_cpu, format_memory, parse_cpu, parse_memory
from basilica.core.spec import (
    GRACE_SECONDS,
    BenchOnStart,
    DeploymentSpec,
    Exec,
    Gpus,
    ProviderFilter,
    Resources,
    Shell,
    Wanted,
)
from basilica.core.world import WorldSize

Json = dict[str, Any]

GROUP, VERSION, KIND, PLURAL = "basilica.dev", "v1alpha1", "UserDeployment", "userdeployments"
API_VERSION = f"{GROUP}/{VERSION}"
EVERYWHERE = f"/apis/{API_VERSION}/{PLURAL}"

FINALIZER = f"{GROUP}/ranks"  # held until every rank has been stopped and its exit recorded
NAME_LABEL = f"{GROUP}/name"
INSTANCE_LABEL = f"{GROUP}/instance"
MADE_AS = f"{GROUP}/made-as"  # "<namespace>/<name>" of an object that the API made; a copy of it is not one
CREATED_AT = f"{GROUP}/created-at"
ORDER = f"{GROUP}/order"
KEY = f"{GROUP}/idempotency-key"
DIGEST = f"{GROUP}/spec-digest"
REQUESTED = f"{GROUP}/requested"  # events of requests, written with the change that they tell of

RANKS_MAX = 4096  # so that the status of a run fits into one object, whatever became of its ranks
_UID_LETTERS = 8


def path_of(namespace: str, name: str = "", subresource: str = "") -> str:
    """Where the API has the objects of a namespace, one of them, or a part of one."""
    parts = (f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}", name, subresource)
    return "/".join(part for part in parts if part)


def instance_of(obj: Json) -> str:
    """The instance name: the object's own if the API made it, else with letters of its uid, so that it is unique for
    ever although people use a name again and again, and in several namespaces."""
    metadata = obj["metadata"]
    name = str(metadata["name"])
    made_as = (metadata.get("annotations") or {}).get(MADE_AS)
    return name if made_as == f"{metadata['namespace']}/{name}" else f"{name}-{metadata['uid'][:_UID_LETTERS]}"


def owner_reference(obj: Json) -> Json:
    """What makes another object go when this one does."""
    metadata = obj["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


def timestamp(moment: float) -> str:
    """As Kubernetes writes times: to the second."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- from the core ---------------------------------------------------------------------------------------------------


def body_of(spec: DeploymentSpec, *, secret: str | None = None) -> Json:
    """The resource's spec, with the defaults written out: a later version's other defaults do not change a run."""
    match spec.program:
        case Shell(script, args):
            program: Json = {"args": list(args)} if args else {}
            script_part = {"command": script}
        case Exec(argv):
            program, script_part = {"command": list(argv)}, {}
    world = spec.world
    distributed: Json = script_part | {
        "worldSize": {"min": world.min, "target": world.target, "max": world.max},
        "rendezvous": _without_none(backend=spec.rendezvous_backend, port=spec.rendezvous_port),
        "providerFilter": {"include": [*spec.provider_filter.include], "exclude": [*spec.provider_filter.exclude]},
        "topologySpread": {"strategy": spec.topology_spread},
        "nccl": {"env": dict(spec.nccl_env)},
        "bench": {"mode": "off"} if spec.bench is None else {"mode": "on-start", "placement": spec.bench.placement},
        "resize": spec.resize,
        "onStall": spec.on_stall,
        "maxRestarts": spec.max_restarts,
        "graceSeconds": spec.grace_seconds,
        **_without_none(deadlineSeconds=spec.deadline_seconds, startDeadlineSeconds=spec.start_deadline_seconds),
    }
    return {
        "name": spec.name,
        "image": spec.image,
        **program,
        "port": spec.port,
        "env": dict(spec.env),
        "resources": _resources_body(spec.resources),
        "cancel": spec.wanted is not Wanted.RUN,
        "freshStarts": spec.gang,
        "distributed": distributed,
        **_without_none(
            secretRef=None if secret is None else {"name": secret},
            workdir=spec.workdir,
            workdirArchive=spec.archive,
            ttlSeconds=spec.ttl_seconds,
        ),
    }


def _resources_body(resources: Resources) -> Json:
    gpus = resources.gpus
    return _without_none(
        cpu=None if resources.cpu is None else format_cpu(resources.cpu),
        memory=None if resources.memory_bytes is None else format_memory(resources.memory_bytes),
        gpus=_without_none(count=gpus.count, model=[*gpus.models], minGpuMemoryGb=gpus.min_memory_gb),
    )


def _without_none(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


# ---- to the core -----------------------------------------------------------------------------------------------------


def secret_of(obj: Json) -> str | None:
    """The Secret whose keys are variables of the ranks."""
    reference = (obj.get("spec") or {}).get("secretRef") or {}
    return reference.get("name")


def spec_of(obj: Json, secrets: Mapping[str, str] | None = None) -> DeploymentSpec:
    """The core's spec; `ValidationError` where an object that its schema let pass is none."""
    try:
        return _spec_of(obj, secrets or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise
        raise ValidationError("spec", type(error).__name__, f"cannot be read: {error}") from error


def _spec_of(obj: Json, secrets: Mapping[str, str]) -> DeploymentSpec:
    metadata, body = obj["metadata"], obj["spec"]
    gang = body["distributed"]
    size = gang["worldSize"]
    providers = gang.get("providerFilter") or {}
    rendezvous = gang.get("rendezvous") or {}
    return DeploymentSpec(
        name=body.get("name") or metadata["name"],
        program=_program(body, gang),
        world=WorldSize(int(size["min"]), int(size["target"]), int(size["max"])),
        wanted=_wanted(metadata, body),
        generation=int(metadata["generation"]),
        gang=int(body.get("freshStarts") or 0),
        image=body.get("image") or "",
        port=body.get("port") or 18789,
        resources=_resources(body.get("resources") or {}),
        env=dict(body.get("env") or {}),
        secrets=dict(secrets),
        nccl_env=dict((gang.get("nccl") or {}).get("env") or {}),
        workdir=body.get("workdir"),
        archive=body.get("workdirArchive"),
        rendezvous_backend=rendezvous.get("backend") or "etcd-v2",
        rendezvous_port=rendezvous.get("port"),
        provider_filter=ProviderFilter(tuple(providers.get("include") or ()), tuple(providers.get("exclude") or ())),
        topology_spread=(gang.get("topologySpread") or {}).get("strategy") or "pack",
        bench=_bench(gang.get("bench") or {}),
        resize=gang.get("resize") or "join",
        on_stall=gang.get("onStall") or "show",
        max_restarts=int(gang.get("maxRestarts") or 0),
        grace_seconds=float(gang.get("graceSeconds", GRACE_SECONDS)),
        ttl_seconds=_seconds(body.get("ttlSeconds")),
        deadline_seconds=_seconds(gang.get("deadlineSeconds")),
        start_deadline_seconds=_seconds(gang.get("startDeadlineSeconds")),
    )


def _wanted(metadata: Json, body: Json) -> Wanted:
    if metadata.get("deletionTimestamp"):
        return Wanted.DELETE
    return Wanted.CANCEL if body.get("cancel") else Wanted.RUN


def _program(body: Json, gang: Json) -> Shell | Exec:
    command, args = tuple(body.get("command") or ()), tuple(body.get("args") or ())
    if gang.get("command"):
        return Shell(gang["command"], (*command, *args))
    if command:
        return Exec((*command, *args))
    problem = "there is nothing to run: give spec.command (a list) or spec.distributed.command (a script)"
    raise ValidationError("command", None, problem)


def _resources(body: Json) -> Resources:
    gpus = body.get("gpus") or {}
    return Resources(
        cpu=parse_cpu(str(body["cpu"]), "resources.cpu") if "cpu" in body else None,
        memory_bytes=parse_memory(str(body["memory"]), "resources.memory") if "memory" in body else None,
        gpus=Gpus(int(gpus.get("count") or 0), tuple(gpus.get("model") or ()), gpus.get("minGpuMemoryGb")),
    )


def _bench(body: Json) -> BenchOnStart | None:
    if body.get("mode", "off") == "off":
        return None
    return BenchOnStart("strict" if body.get("placement") == "strict" else "preferred")


def _seconds(value: float | None) -> float | None:
    return float(value) if value else None
