"""The definition of the custom resource: its schema, from the table of options and the core's own types and limits, and
its rules.

Every string, list and map has a limit: the API server adds up what a rule could cost at worst and refuses a definition
whose rules could cost too much. The rules are CEL; `oldSelf` makes one hold for changes only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from typing import Any, get_type_hints

from basilica.core.names import NAME_MAX, NAME_PATTERN
from basilica.core.notices import NoticeKind
from basilica.core.phase import Phase
from basilica.core.spec import ARG_BYTES_MAX, DeploymentSpec, Range
from basilica.core.world import WorldStatus
from basilica.kube.manifests.userdeployment import GROUP, KIND, OPTIONS, PLURAL, RANKS_MAX, VERSION
from basilica.wire.forms import Choice, Flag, Number, Quantity, Text, Texts, Variables, Whole
from basilica.wire.spec import AUTO, GROUPS, NOTHING_TO_RUN, PLACEMENTS, Option, default, form, tree
from basilica.wire.views import camel

Json = dict[str, Any]

INSTANCE_MAX = NAME_MAX + 9  # with the letters that make an instance name unique
STATE_MAX = 1 << 20
_ITEMS_MAX = 1024
_TARGET, _READY = ".spec.distributed.worldSize.target", ".status.world.ready"
_ACTED_ON = ".status.world.target"  # a change of an ended run has no effect


def definition(options: Sequence[Option] = OPTIONS, spec: type[DeploymentSpec] = DeploymentSpec) -> Json:
    """Return the CustomResourceDefinition."""
    columns = [
        _column("Phase", "string", ".status.phase"),
        _column("Ready", "integer", _READY),
        _column("Target", "integer", _ACTED_ON),
        _column("Goodput", "string", ".status.goodput.percent"),
        _column("Message", "string", ".status.message", priority=1),
        _column("Age", "date", ".metadata.creationTimestamp"),
    ]
    version: Json = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema(tree(options), spec)},
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


def _schema(options: Json, spec: type[DeploymentSpec]) -> Json:
    named = f"has(self.spec.name) || size(self.metadata.name) <= {NAME_MAX}"
    return _object(
        "A training run: a gang of ranks, wanted (spec) and observed (status).",
        {"spec": _spec(options, spec), "status": _status()},
        required=["spec"],
        rules=[
            _rule(f"size(self.metadata.name) <= {INSTANCE_MAX}", f"a name has at most {INSTANCE_MAX} characters"),
            _rule(named, f"a name has at most {NAME_MAX} characters"),
            _rule(f"self.metadata.name.matches('{NAME_PATTERN}')", "a name is lower-case letters, digits and '-'"),
        ],
    )


# ---- the spec --------------------------------------------------------------------------------------------------------


def _spec(options: Json, spec: type[DeploymentSpec]) -> Json:
    command = "has(self.command) && size(self.command) > 0"
    script = "has(self.distributed.command) && size(self.distributed.command) > 0"
    script += f" && self.distributed.command != '{AUTO}'"
    gang = options.pop("distributed")
    fields = {part: _field(part, found, spec) for part, found in options.items()}
    own = {
        "secretRef": _object(
            "A Secret of the namespace; each of its keys is a variable of the ranks.",
            {"name": _text("Its name.", 253)},
            required=["name"],
        ),
        "cancel": {"type": "boolean", "default": False, "description": "End the run; it stays readable."},
        "freshStarts": _whole("Raise it to have all ranks start afresh.", Range(0, 1_000_000), default=0),
    }
    return _object(
        "What is wanted. The world size, `cancel` and `freshStarts` may be changed; the rest stands.",
        fields | own | {"distributed": _field("distributed", gang, spec)},
        required=["distributed"],
        rules=[
            _rule(f"({command}) || ({script})", f"distributed.command: {NOTHING_TO_RUN}"),
            _rule("oldSelf.cancel ? self.cancel : true", "a cancelled run stays cancelled"),
            _rule("self.freshStarts >= oldSelf.freshStarts", "freshStarts only grows"),
            *(_stands(part) for part in (*options, "secretRef")),
        ],
    )


def _field(path: str, found: Option | Json, spec: type[DeploymentSpec]) -> Json:
    """Return the schema of one option, or of all options below a part of a path."""
    if isinstance(found, Option):
        return _value(found, spec)
    fields = {part: _field(f"{path}.{part}", below, spec) for part, below in found.items()}
    required = [part for part, below in found.items() if _is_needed(below, spec)]
    return _object(
        GROUPS.get(path, ""),
        fields,
        required=required,
        rules=_rules(path, found),
        default=None if required else {},
    )


def _is_needed(found: Option | Json, spec: type[DeploymentSpec]) -> bool:
    if isinstance(found, Option):
        return default(found, spec) is MISSING
    return any(_is_needed(below, spec) for below in found.values())


def _rules(path: str, below: Json) -> list[Json]:
    match path:
        case "distributed":
            return [_stands(part) for part in below if part != "worldSize"]
        case "distributed.worldSize":
            stands = "self.min == oldSelf.min && self.max == oldSelf.max"
            return [
                _rule("self.min <= self.target", "worldSize: min must not be greater than target"),
                _rule("self.target <= self.max", "worldSize: target must not be greater than max"),
                _rule(stands, "worldSize: min and max stand; scale target"),
            ]
        case "distributed.bench":
            known = f"!has(self.placement) || self.placement in {list(PLACEMENTS.values)}"
            return [_rule(f"self.mode == 'off' || {known}", f"placement: must be {PLACEMENTS.wanted}")]
        case _:
            return []


def _value(option: Option, spec: type[DeploymentSpec]) -> Json:
    known = default(option, spec)
    fallback = None if known is MISSING else known
    match form(option, spec):
        case Text(most, pattern):
            return _text(option.about, most, pattern=pattern, default=fallback)
        case Texts(letters, most):
            return _texts(option.about, letters, most=most)
        case Variables():
            return _variables(option.about)
        case Flag():
            return {"type": "boolean", "description": option.about, "default": fallback}
        case Whole(limits):
            most_ranks = Range(1, RANKS_MAX) if option.attribute.startswith("world.") else None
            return _whole(option.about, most_ranks or limits, default=fallback)
        case Number(limits):
            return _number(option.about, limits, default=fallback)
        case Choice(values):
            found = {"type": "string", "enum": list(values), "description": option.about}
            return found | ({} if fallback is None else {"default": fallback})
        case Quantity():
            return _quantity(option.about)


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
    kinds = {int: {"type": "integer", "minimum": 0}, bool: {"type": "boolean"}}
    counts = {camel(name): kinds[kind] for name, kind in get_type_hints(WorldStatus).items()}
    world = _object("`ready` counts ranks that are up and those that have exited 0.", counts)
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
            "goodput": _object(
                "How much of the time of all wanted ranks trained, when this was written.",
                {
                    "percent": _text("From 0 to 100, or two bounds where programs report no steps: `0.0-93.1`.", 64),
                    "lost": _text("The largest loss, in the mean of all ranks: `rendezvous 21 s`.", 256),
                },
            ),
            "notice": _notice(),
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


def _notice() -> Json:
    moment = {"type": "string", "format": "date-time"}
    return _object(
        "A planned change that ranks were told of. It happens when they are ready, at `until` at the latest.",
        {
            "number": {"type": "integer", "minimum": 0},
            "kind": _text(f"One of {', '.join(kind.value for kind in NoticeKind)}.", 64),
            "since": moment,
            "until": moment,
            "reason": _text("", 32768),
            "target": {"type": "integer", "minimum": 0, "description": "The size of the world after it."},
            "step": {"type": "integer", "minimum": 0, "description": "The last step before it."},
            "doneAt": {**moment, "description": "When the change was made; it has yet to reach all ranks."},
        },
    )


def _rank_exits() -> Json:
    """Return the schema of the API's `rankExits`, without output of the ranks."""
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
            "cause": _text("The worker whose failure made the rank's torchrun agent exit.", 1024),
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


def _whole(description: str, limits: Range, *, default: int | None = None) -> Json:
    return {"type": "integer"} | _limited(description, limits, default)


def _number(description: str, limits: Range, *, default: float | None) -> Json:
    return {"type": "number"} | _limited(description, limits, default)


def _limited(description: str, limits: Range, default: float | None) -> Json:
    least, most = _plain(limits.low), _plain(limits.high)
    found: Json = {"minimum": least, "maximum": most, "description": description}
    return found | ({} if default is None else {"default": _plain(default)})


def _plain(number: float) -> float:
    """Return a number as people write it: 10, not 10.0."""
    return int(number) if number == int(number) else number


def _quantity(description: str) -> Json:
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "maxLength": 64,
        "description": description,
    }


def _rule(rule: str, message: str) -> Json:
    return {"rule": rule, "message": message}


def _stands(field: str) -> Json:
    rule = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
    return _rule(rule, f"{field} cannot be changed: make a new UserDeployment")
