"""What a container's process is given: its variables and its command."""

import base64
import re
from collections.abc import Callable
from typing import Any

from basilica_testkube.kinds import CONFIG_MAPS, SECRETS, Kind
from basilica_testkube.values import Json, annotations_of, at, labels_of, meta

Lookup = Callable[[Kind, str], Json | None]
_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ConfigError(Exception):
    """The container cannot be made: something that it refers to is not there."""

    reason = "CreateContainerConfigError"


def expanded(text: str, env: dict[str, str]) -> str:
    """`$(NAME)` becomes the variable, `$$` a dollar; what is unknown stays as it is written."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else env.get(found[2], found[0])

    return _REFERENCE.sub(replace, text)


def variables(pod: Json, container: Json, lookup: Lookup) -> dict[str, str]:
    """The variables that a pod's manifest gives a container."""
    env: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        env |= _all_of(source, lookup)
    for variable in container.get("env") or []:
        if "valueFrom" in variable:
            value = _value_from(pod, container, variable["valueFrom"], lookup)
        else:
            value = expanded(variable.get("value", ""), env)
        if value is not None:
            env[variable["name"]] = value
    return env


def command(container: Json, entrypoint: list[str], env: dict[str, str]) -> list[str]:
    """The command line; `entrypoint` is the image's own."""
    first = container.get("command") or entrypoint
    if not first and not container.get("args"):
        raise ConfigError("no command specified")
    return [expanded(part, env) for part in (*first, *(container.get("args") or []))]


def _all_of(source: Json, lookup: Lookup) -> dict[str, str]:
    prefix = source.get("prefix", "")
    for field, kind in (("configMapRef", CONFIG_MAPS), ("secretRef", SECRETS)):
        if field in source:
            found = _found(kind, source[field], lookup)
            return {prefix + key: value for key, value in _texts(kind, found).items()} if found is not None else {}
    return {}


def _found(kind: Kind, reference: Json, lookup: Lookup) -> Json | None:
    found = lookup(kind, reference["name"])
    if found is None and not reference.get("optional"):
        raise ConfigError(f'{kind.kind.lower()} "{reference["name"]}" not found')
    return found


def _texts(kind: Kind, obj: Json) -> dict[str, str]:
    data = obj.get("data") or {}
    if kind == SECRETS:
        decoded = {key: base64.b64decode(value).decode() for key, value in data.items()}
        return decoded | (obj.get("stringData") or {})
    return dict(data)


def _value_from(pod: Json, container: Json, source: Json, lookup: Lookup) -> str | None:
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        limit = at(container, source["resourceFieldRef"]["resource"].replace("limits.", "resources.limits.", 1))
        return "" if limit is None else str(limit)
    for field, kind in (("configMapKeyRef", CONFIG_MAPS), ("secretKeyRef", SECRETS)):
        if field in source:
            reference = source[field]
            found = _found(kind, reference, lookup)
            texts = _texts(kind, found) if found is not None else {}
            if reference["key"] in texts:
                return texts[reference["key"]]
            if not reference.get("optional"):
                raise ConfigError(f"couldn't find key {reference['key']} in {kind.kind} {reference['name']}")
    return None


def _field(pod: Json, path: str) -> str:
    found: Any
    if subscript := _SUBSCRIPT.fullmatch(path):
        found = (labels_of if subscript[1] == "labels" else annotations_of)(pod).get(subscript[2], "")
    elif path in ("metadata.labels", "metadata.annotations"):
        values = meta(pod).get(path.partition(".")[2]) or {}
        found = "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))
    else:
        found = at(pod, path)
    return "" if found is None else str(found)
