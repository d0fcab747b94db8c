"""Manifests as YAML for people. A text that YAML could read as another type is quoted as JSON."""

import json
import re
from collections.abc import Iterable, Mapping

Value = object

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def to_yaml(documents: Iterable[Mapping[str, Value]]) -> str:
    """Return the documents one after the other; a value without a simple form is JSON, a subset of YAML."""
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Value) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, below in value.items() for line in _entry(f"{_scalar(key)}:", below)]
    if isinstance(value, list) and value:
        return [line for below in value for line in _item(below)]
    return [_scalar(value)]


def _entry(head: str, value: Value) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [head, *(f"  {line}" for line in _lines(value))]
    if isinstance(value, list) and value:
        return [head, *_lines(value)]
    return [f"{head} {_scalar(value)}"]


def _item(value: Value) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Value) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
