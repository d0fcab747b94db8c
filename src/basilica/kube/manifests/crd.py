"""The definition of the custom resource: its schema, from the core's own types and limits, and its rules.

Every string, list and map has a limit: the API server adds up what a rule could cost at worst and refuses a definition
whose rules could cost too much. The rules are CEL; `oldSelf` makes one hold for changes only.
"""

from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from basilica.core.names import NAME_MAX
from basilica.core.phase import Phase
from basilica.core.spec import ARG_BYTES_MAX, GRACE_SECONDS, SCRIPT_BYTES_MAX, SECONDS_MAX, BenchOnStart, DeploymentSpec
from basilica.kube.manifests.userdeployment import GROUP, KIND, PLURAL, RANKS_MAX, VERSION

Json = dict[str, Any]

INSTANCE_MAX = NAME_MAX + 9  # with the letters that make an instance name unique
STATE_MAX = 1 << 20
NAME_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_ITEMS_MAX, _LABELS_MAX = 1024, 64
_TARGET, _READY = ".spec.distributed.worldSize.target", ".status.world.ready"
_ACTED_ON = ".status.world.target"  # a change of a run that has ended is none
_HINTS = get_type_hints(DeploymentSpec)


def definition() -> Json:
    """The CustomResourceDefinition."""
    columns = [
        _column("Phase", "string", ".status.phase"),
        _column("Ready", "integer", _READY),
        _column("Target", "integer", _ACTED_ON),
        _column("Message", "string", ".status.message", priority=1),
        _column("Age", "date", ".metadata.creationTimestamp"),
    ]
    version: Json = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema()},
        "subresources": {"status": {}, "scale": {"specReplicasPath": _TARGET, "statusReplicasPath": _READY}},
        "additionalPrinterColumns": columns,
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": "userdeployment",
        "shortNames": ["ud"],
        "categories": ["all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def _column(name: str, kind: str, path: str, *, priority: int = 0) -> Json:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})


def _schema() -> Json:
    named = f"has(self.spec.name) || size(self.metadata.name) <= {NAME_MAX}"
    return _object(
        "A training run: a gang of ranks, wanted (spec) and observed (status).",
        {"spec": _spec(), "status": _status()},
        required=["spec"],
        rules=[
            _rule(f"size(self.metadata.name) <= {INSTANCE_MAX}", f"a name has at most {INSTANCE_MAX} characters"),
            _rule(named, f"a name has at most {NAME_MAX} characters"),
            _rule(f"self.metadata.name.matches('{NAME_PATTERN}')", "a name is lower-case letters, digits and '-'"),
        ],
    )


# ---- the spec --------------------------------------------------------------------------------------------------------


def _spec() -> Json:
    command = "has(self.command) && size(self.command) > 0"
    script = "has(self.distributed.command) && size(self.distributed.command) > 0"
    fixed = ("name", "image", "command", "args", "port", "env", "secretRef", "workdir", "workdirArchive", "resources")
    return _object(
        "What is wanted. The world size, `cancel` and `freshStarts` may be changed; the rest stands.",
        {
            "name": _text("What the run is called; the object's name by default.", NAME_MAX, pattern=NAME_PATTERN),
            "image": _text("The image that ranks run in.", 4096, default=""),
            "command": _texts("The program and its arguments, executed as they stand.", ARG_BYTES_MAX),
            "args": _texts("More arguments, or $1… of `distributed.command`.", ARG_BYTES_MAX),
            "port": _whole("A port that ranks may use among themselves.", 1, 65535, default=18789),
            "env": _variables("Variables of the ranks."),
            "secretRef": _object(
                "A Secret of the namespace; each of its keys is a variable of the ranks.",
                {"name": _text("Its name.", 253)},
                required=["name"],
            ),
            "workdir": _text("The directory that ranks run in.", 4096),
            "workdirArchive": _text(
                "The SHA-256 of an archive that was sent to the API.", 64, pattern="^[0-9a-f]{64}$"
            ),
            "resources": _resources(),
            "ttlSeconds": _seconds("Cancel the run so long after its creation; 0: never.", default=None),
            "cancel": {"type": "boolean", "default": False, "description": "End the run; it stays readable."},
            "freshStarts": _whole("Raise it to have all ranks start afresh.", 0, 1_000_000, default=0),
            "distributed": _distributed(),
        },
        required=["distributed"],
        rules=[
            _rule(f"({command}) || ({script})", "there is nothing to run: give command or distributed.command"),
            _rule("oldSelf.cancel ? self.cancel : true", "a cancelled run stays cancelled"),
            _rule("self.freshStarts >= oldSelf.freshStarts", "freshStarts only grows"),
            *(_stands(field) for field in fixed),
            _stands("ttlSeconds"),
        ],
    )


def _resources() -> Json:
    gpus = _object(
        "GPUs of each rank.",
        {
            "count": _whole("How many.", 0, 1024, default=0),
            "model": _texts("Which will do; empty: any.", 256, most=_LABELS_MAX),
            "minGpuMemoryGb": _whole("The least memory of each.", 1, 100_000),
        },
        default={},
    )
    return _object(
        "What each rank needs.",
        {
            "cpu": _quantity("Cores: 8, 0.5, 500m."),
            "memory": _quantity("Bytes: 32Gi, 512Mi, 2G."),
            "gpus": gpus,
        },
        default={},
    )


def _distributed() -> Json:
    fixed = ("command", "rendezvous", "providerFilter", "topologySpread", "nccl", "bench", "resize", "onStall")
    numbers = ("maxRestarts", "graceSeconds", "deadlineSeconds", "startDeadlineSeconds")
    providers = {
        "include": _texts("Only these; empty: any.", 256, most=_LABELS_MAX),
        "exclude": _texts("None of these.", 256, most=_LABELS_MAX),
    }
    port = _whole("Its port, where it matters.", 1, 65535)
    return _object(
        "The gang.",
        {
            "worldSize": _world_size(),
            "command": _text("A script for /bin/sh.", SCRIPT_BYTES_MAX),
            "rendezvous": _object(
                "How ranks meet.", {"backend": _choice("rendezvous_backend"), "port": port}, default={}
            ),
            "providerFilter": _object("Which providers' nodes may be used.", providers, default={}),
            "topologySpread": _object("How near ranks are.", {"strategy": _choice("topology_spread")}, default={}),
            "nccl": _object("Of NCCL.", {"env": _variables("Variables that go before our own.")}, default={}),
            "bench": _bench(),
            "resize": _choice("resize"),
            "onStall": _choice("on_stall"),
            "maxRestarts": _whole("How often a failed rank starts again.", 0, 1_000_000, default=0),
            "graceSeconds": _seconds("From SIGTERM to SIGKILL.", most=86400, default=GRACE_SECONDS),
            "deadlineSeconds": _seconds("Fail the run if it takes longer; 0: no deadline.", default=None),
            "startDeadlineSeconds": _seconds("Fail the run if it is not up by then; 0: no deadline.", default=None),
        },
        required=["worldSize"],
        rules=[_stands(field) for field in (*fixed, *numbers)],
    )


def _world_size() -> Json:
    return _object(
        "How many ranks: wanted now (target), the fewest to train with (min), the most (max).",
        {name: _whole(f"{name.capitalize()} number of ranks.", 1, RANKS_MAX) for name in ("min", "target", "max")},
        required=["min", "target", "max"],
        rules=[
            _rule("self.min <= self.target", "worldSize: min must not be greater than target"),
            _rule("self.target <= self.max", "worldSize: target must not be greater than max"),
            _rule("self.min == oldSelf.min && self.max == oldSelf.max", "worldSize: min and max stand; scale target"),
        ],
    )


def _bench() -> Json:
    placements = list(get_args(get_type_hints(BenchOnStart)["placement"]))
    fields: Json = {
        "mode": {"type": "string", "enum": ["off", "on-start"], "default": "off"},
        "placement": {"type": "string", "enum": placements},
    }
    return _object("Measures the link between two of the run's nodes.", fields, default={})


# ---- the status ------------------------------------------------------------------------------------------------------


def _status() -> Json:
    moment = {"type": "string", "format": "date-time"}
    condition = _object(
        "",
        {
            "type": _text("", 316),
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            "lastTransitionTime": moment,
            "reason": _text("", 1024),
            "message": _text("", 32768),
        },
        required=["type", "status", "lastTransitionTime", "reason", "message"],
    )
    counts = {name: {"type": "integer", "minimum": 0} for name in ("ready", "target", "min", "max")}
    world = _object("`ready` counts ranks that are up and those that have exited 0.", counts)
    world["properties"]["belowMinimum"] = {"type": "boolean"}
    culprit = _object(
        "The rank that failed first.",
        {
            "rank": {"type": "integer", "minimum": 0},
            "exitCode": {"type": "integer"},
            "reason": _text("", 1024),
            "evidence": _text("", 4096),
        },
    )
    phases = ", ".join(phase.value for phase in Phase)
    return _object(
        "What the operator last observed; nobody else writes it.",
        {
            "observedGeneration": {
                "type": "integer",
                "format": "int64",
                "minimum": 0,
                "description": "Which metadata.generation this reflects.",
            },
            "phase": _text(f"One of {phases}.", 64),
            "message": _text("What it is waiting for, or how it ended.", 32768),
            "world": world,
            "conditions": {
                "type": "array",
                "items": condition,
                "maxItems": 32,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
            "terminalAt": moment,
            "settled": {"type": "boolean", "description": "Every exit is in."},
            "culprit": culprit,
            "rankExits": _rank_exits(),
            "rankExitsOmitted": {
                "type": "integer",
                "minimum": 0,
                "description": "How many exits are not shown, since an object has no room for them; the API has all.",
            },
            "events": _text("The operator's own record of events, which outlives Kubernetes' Events.", STATE_MAX),
            "state": _text("The operator's own record of every rank; the API renders it.", STATE_MAX),
        },
    )


def _rank_exits() -> Json:
    """As `rankExits` of the API, without what ranks wrote."""
    moment = {"type": "string", "format": "date-time"}
    exit = _object(
        "",
        {
            "rank": {"type": "integer", "minimum": 0},
            "exitCode": {"type": "integer", "description": "The program's own, 128+n for signal n; -1: nobody knows."},
            "restartCount": {"type": "integer", "minimum": 0},
            "terminationReason": _text("OOMKilled, Error, NodeLost, … with evidence; else Unknown.", 256),
            "signal": _text("", 64),
            "startedAt": moment,
            "finishedAt": moment,
            "node": _text("", 256),
            "role": _text("culprit, victim or stopped.", 64),
            "error": _text("The Python exception that it failed with, in a line.", 1024),
        },
        required=["rank", "exitCode", "restartCount", "terminationReason", "finishedAt"],
    )
    return {
        "type": "array",
        "items": exit,
        "maxItems": _ITEMS_MAX,
        "x-kubernetes-list-type": "atomic",
        "description": "How each rank ended; empty while the run is not over.",
    }


# ---- words of the schema ---------------------------------------------------------------------------------------------


def _object(
    description: str,
    fields: Json,
    *,
    required: Iterable[str] = (),
    rules: Iterable[Json] = (),
    default: Json | None = None,
) -> Json:
    found: Json = {"type": "object", "properties": fields}
    found |= {"description": description} if description else {}
    found |= {"required": list(required)} if required else {}
    found |= {"x-kubernetes-validations": list(rules)} if rules else {}
    return found | ({} if default is None else {"default": default})


def _text(description: str, most: int, *, pattern: str | None = None, default: str | None = None) -> Json:
    found: Json = {"type": "string", "maxLength": most}
    found |= {"description": description} if description else {}
    found |= {} if pattern is None else {"pattern": pattern}
    return found | ({} if default is None else {"default": default})


def _texts(description: str, most_letters: int, *, most: int = _ITEMS_MAX) -> Json:
    items = {"type": "string", "maxLength": most_letters}
    return {"type": "array", "items": items, "maxItems": most, "description": description}


def _variables(description: str) -> Json:
    values = {"type": "string", "maxLength": ARG_BYTES_MAX}
    return {"type": "object", "additionalProperties": values, "maxProperties": 4096, "description": description}


def _whole(description: str, least: int, most: int, *, default: int | None = None) -> Json:
    found: Json = {"type": "integer", "minimum": least, "maximum": most, "description": description}
    return found | ({} if default is None else {"default": default})


def _seconds(description: str, *, most: float = SECONDS_MAX, default: float | None) -> Json:
    found: Json = {"type": "number", "minimum": 0, "maximum": int(most), "description": description}
    return found | ({} if default is None else {"default": int(default)})


def _quantity(description: str) -> Json:
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "maxLength": 64,
        "description": description,
    }


def _choice(field: str) -> Json:
    """One of the values that the core's type allows, the first by default."""
    values = list(get_args(_HINTS[field]))
    return {"type": "string", "enum": values, "default": values[0]}


def _rule(rule: str, message: str) -> Json:
    return {"rule": rule, "message": message}


def _stands(field: str) -> Json:
    rule = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
    return _rule(rule, f"{field} cannot be changed: make a new UserDeployment")
