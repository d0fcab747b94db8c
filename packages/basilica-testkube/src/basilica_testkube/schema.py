"""One walk through an object along its schema: what is unknown is dropped and told, what is wrong is told.

It serves the published schemas of the built-in kinds and the structural schemas of custom resources.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import kubernetes_validate
from kubernetes_validate.utils import schema_contents

from basilica_testkube.errors import Cause
from basilica_testkube.kinds import Kind
from basilica_testkube.values import Json, copied

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+|[KMGTPE]i|[numkMGTPE]?)")


def newest() -> str:
    """The newest Kubernetes whose schemas are published with `kubernetes-validate`."""
    return str(kubernetes_validate.latest_version())


@cache
def definitions(version: str) -> Json:
    contents = schema_contents(f"kubernetes-json-schema/v{version}-local/_definitions.json", version)
    found: Json = contents["$defs"]
    return found


@cache
def published(kind: Kind, version: str) -> Json:
    """The schema of a built-in kind in one version of Kubernetes."""
    group = kind.group.partition(".")[0]
    name = "-".join(part for part in (kind.kind.lower(), group, kind.version) if part)
    found: Json = schema_contents(f"kubernetes-json-schema/v{version}-local/{name}.json", version)
    return found


def object_metadata(version: str) -> Json:
    """The schema of `metadata`, which is the same for all kinds."""
    found: Json = definitions(version)["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"]
    return found


@dataclass(slots=True)
class Walk:
    """What was found on the way through one object."""

    version: str = ""  # of the published schemas; empty for a custom resource
    unknown: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)  # a typed kind cannot even be decoded with these
    causes: list[Cause] = field(default_factory=list)

    def decode(self, value: Any, schema: Json, path: str = "") -> Any:
        """`value` without what the schema does not know, with the schema's defaults."""
        schema = self._resolved(schema)
        if path.endswith((".managedFields", ".fieldsV1")):
            return value
        if schema.get("x-kubernetes-int-or-string") or "oneOf" in schema:
            return self._int_or_string(value, schema, path)
        if not self._is_of_type(value, schema, path):
            return value
        self._check(value, schema, path)
        if isinstance(value, dict):
            return self._object(value, schema, path)
        if isinstance(value, list) and "items" in schema:
            empty = self._empty(schema["items"]) if self.version else None
            items = [empty if item is None else item for item in value]
            return [self.decode(item, schema["items"], f"{path}[{n}]") for n, item in enumerate(items)]
        return value

    def _empty(self, schema: Json) -> Any:
        """What null means in a list of a typed kind: the empty value."""
        wanted = self._resolved(schema).get("type") or ()
        return {} if "object" in wanted else [] if "array" in wanted else "" if "string" in wanted else 0

    def _resolved(self, schema: Json) -> Json:
        reference = schema.get("$ref")
        if reference is None:
            return schema
        found: Json = definitions(self.version)[reference.rpartition("/")[2]]
        return found

    def _int_or_string(self, value: Any, schema: Json, path: str) -> Any:
        numeric = (int,) if schema.get("x-kubernetes-int-or-string") or _says(schema, "integer") else (int, float)
        if isinstance(value, bool) or not isinstance(value, (str, *numeric)):
            self._mistype(path, value, "string or number")
        elif (
            not _says(schema, "integer") and isinstance(value, str) and not _QUANTITY.fullmatch(value) and self.version
        ):
            self.mistyped.append(f"{path}: {value!r} is no quantity: quantities must match {_QUANTITY.pattern}")
        return str(value) if self.version and not _says(schema, "integer") else value

    def _is_of_type(self, value: Any, schema: Json, path: str) -> bool:
        wanted = schema.get("type")
        names = [wanted] if isinstance(wanted, str) else [name for name in wanted or [] if name != "null"]
        if value is None:
            if self.version or schema.get("nullable"):
                return False
            self._mistype(path, value, " or ".join(names))
            return False
        if not names:
            return True
        is_bool = isinstance(value, bool)
        if any(isinstance(value, _TYPES[name]) and is_bool == (name == "boolean") for name in names):
            return True
        self._mistype(path, value, " or ".join(names))
        return False

    def _mistype(self, path: str, value: Any, wanted: str) -> None:
        shown = "null" if value is None else type(value).__name__
        if self.version:
            self.mistyped.append(f"json: cannot unmarshal {shown} into field {path.lstrip('.')} of type {wanted}")
        else:
            self._fault(path, "FieldValueTypeInvalid", f'Invalid value: "{shown}": must be of type {wanted}')

    def _fault(self, path: str, reason: str, message: str) -> None:
        self.causes.append(Cause(path.lstrip(".") or "<nil>", reason, message))

    def _object(self, value: Json, schema: Json, path: str) -> Json:
        known, others = schema.get("properties"), schema.get("additionalProperties")
        keeps_all = bool(schema.get("x-kubernetes-preserve-unknown-fields")) or (known is None and others is None)
        if schema.get("x-kubernetes-embedded-resource"):
            known = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}, **(known or {})}
        decoded: Json = {}
        for key, item in value.items():
            place = f"{path}.{key}"
            below = (known or {}).get(key, others if isinstance(others, dict) else None)
            if item is None and (self.version or (below is not None and "default" in below)):
                continue  # null is "not given" to a typed kind, and to a field that has a default
            if below is not None:
                decoded[key] = self.decode(item, below, place)
            elif keeps_all or others is True:
                decoded[key] = item
            else:
                self.unknown.append(place.lstrip("."))
        for key, below in (known or {}).items():
            if not self.version and key not in decoded and "default" in below:
                decoded[key] = self.decode(copied(below["default"]), below, f"{path}.{key}")
        for key in schema.get("required") or []:
            if key not in decoded:
                self._fault(f"{path}.{key}", "FieldValueRequired", "Required value")
        return decoded

    def _check(self, value: Any, schema: Json, path: str) -> None:
        """The value rules; a custom resource's may also be combined with allOf, anyOf, oneOf and not."""
        if "enum" in schema and value not in schema["enum"]:
            supported = ", ".join(f'"{item}"' for item in schema["enum"])
            message = f'Unsupported value: "{value}": supported values: {supported}'
            self._fault(path, "FieldValueNotSupported", message)
        for wrong in _value_faults(value, schema):
            self._fault(path, "FieldValueInvalid", f"Invalid value: {_shown(value)}: {wrong}")
        if self.version:
            return
        for part in schema.get("allOf") or []:
            self._logic(value, part, path)
        if "anyOf" in schema and not any(self._passes(value, part) for part in schema["anyOf"]):
            self._fault(
                path, "FieldValueInvalid", f"Invalid value: {_shown(value)}: must validate at least one schema (anyOf)"
            )
        if "not" in schema and self._passes(value, schema["not"]):
            self._fault(
                path, "FieldValueInvalid", f"Invalid value: {_shown(value)}: must not validate the schema (not)"
            )

    def _logic(self, value: Any, schema: Json, path: str) -> None:
        """A schema inside allOf and its like: it tests, and neither prunes nor defaults."""
        self._check(value, schema, path)
        if isinstance(value, dict):
            for key in schema.get("required") or []:
                if key not in value:
                    self._fault(f"{path}.{key}", "FieldValueRequired", "Required value")
            for key, below in (schema.get("properties") or {}).items():
                if key in value:
                    self._logic(value[key], below, f"{path}.{key}")

    def _passes(self, value: Any, schema: Json) -> bool:
        trial = Walk()
        trial._logic(value, schema, "")
        return not trial.causes


def _says(schema: Json, name: str) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return name == "integer"
    return any(name in (part.get("type") or ()) for part in schema.get("oneOf") or [])


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _value_faults(value: Any, schema: Json) -> list[str]:
    if isinstance(value, bool):
        return []
    if isinstance(value, (int, float)):
        return _number_faults(value, schema)
    if isinstance(value, str):
        return _text_faults(value, schema)
    size = len(value) if isinstance(value, (list, dict)) else 0
    least, most = ("minItems", "maxItems") if isinstance(value, list) else ("minProperties", "maxProperties")
    wrong = []
    if size < schema.get(least, 0):
        wrong.append(f"should have at least {schema[least]} items")
    if size > schema.get(most, size):
        wrong.append(f"must have at most {schema[most]} items")
    if isinstance(value, list) and _repeats(value, schema):
        wrong.append("duplicate value in a list that is a set or a map")
    return wrong


def _repeats(value: list[Any], schema: Json) -> bool:
    kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys") or []
    if kind == "map":
        seen = [tuple(item.get(key) for key in keys) for item in value if isinstance(item, dict)]
        return any(item in seen[:n] for n, item in enumerate(seen))
    return kind == "set" and any(item in value[:n] for n, item in enumerate(value))


def _number_faults(value: float, schema: Json) -> list[str]:
    wrong = []
    if "minimum" in schema and (
        value < schema["minimum"] or (schema.get("exclusiveMinimum") is True and value == schema["minimum"])
    ):
        wrong.append(f"should be greater than or equal to {schema['minimum']}")
    if "maximum" in schema and (
        value > schema["maximum"] or (schema.get("exclusiveMaximum") is True and value == schema["maximum"])
    ):
        wrong.append(f"should be less than or equal to {schema['maximum']}")
    if schema.get("format") == "int32" and not -(1 << 31) <= value < 1 << 31:
        wrong.append("does not fit into int32")
    if schema.get("multipleOf") and value % schema["multipleOf"]:
        wrong.append(f"should be a multiple of {schema['multipleOf']}")
    return wrong


def _text_faults(value: str, schema: Json) -> list[str]:
    wrong = []
    if len(value) < schema.get("minLength", 0):
        wrong.append(f"should be at least {schema['minLength']} chars long")
    if len(value) > schema.get("maxLength", len(value)):
        wrong.append(f"may not be more than {schema['maxLength']} bytes")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        wrong.append(f"should match '{schema['pattern']}'")
    if schema.get("format") == "date-time":
        try:
            datetime.fromisoformat(value)
        except ValueError:
            wrong.append("is no time in RFC 3339")
    return wrong
