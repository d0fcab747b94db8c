"""Server-side apply: what a manager once said and says no more is taken back, what others said is left alone.

Each manager's last word is kept whole. Lists with a merge key are maps of items; all others are values.
"""

from typing import Any

from basilica_testkube.errors import ApiError
from basilica_testkube.patch import resolved
from basilica_testkube.values import Json, copied

_IDENTITY = ("apiVersion", "kind", "metadata.name", "metadata.namespace")


def list_keys(schema: Json) -> list[str]:
    """By what the items of a list are told apart; nothing for a list that is one value."""
    if schema.get("x-kubernetes-list-type") == "map":
        return list(schema.get("x-kubernetes-list-map-keys") or [])
    if schema.get("x-kubernetes-patch-strategy", "").startswith("merge"):
        return [schema["x-kubernetes-patch-merge-key"]] if "x-kubernetes-patch-merge-key" in schema else []
    return []


def applied(live: Any, last: Any, new: Any, schema: Json, version: str) -> Any:
    """`live` after a manager whose word was `last` says `new`."""
    schema = resolved(schema, version)
    if isinstance(new, dict) and isinstance(live, dict):
        result = dict(live)
        for key in last if isinstance(last, dict) else ():
            if key not in new:
                result.pop(key, None)
        for key, value in new.items():
            before = last.get(key) if isinstance(last, dict) else None
            result[key] = applied(live.get(key), before, value, _below(schema, key), version)
        return result
    keys = list_keys(schema)
    if isinstance(new, list) and isinstance(live, list) and keys:
        before = last if isinstance(last, list) else []
        return _applied_list((live, before, new), keys, schema.get("items") or {}, version)
    return copied(new)


def _applied_list(
    states: tuple[list[Any], list[Any], list[Any]], keys: list[str], items: Json, version: str
) -> list[Any]:
    live, last, new = states

    def name(item: Json) -> tuple[Any, ...]:
        return tuple(item.get(key) for key in keys)

    wanted, said = {name(item): item for item in new}, {name(item): item for item in last}
    kept = [item for item in live if name(item) in wanted or name(item) not in said]
    present = {name(item) for item in kept}
    result = [
        applied(item, said.get(name(item)), wanted[name(item)], items, version) if name(item) in wanted else item
        for item in kept
    ]
    return [*result, *(copied(item) for item in new if name(item) not in present)]


def _below(schema: Json, key: str) -> Json:
    others = schema.get("additionalProperties")
    below: Json = (schema.get("properties") or {}).get(key) or (others if isinstance(others, dict) else {})
    return below


def leaves(value: Any, schema: Json, version: str, path: str = "") -> dict[str, Any]:
    """The values that a manager owns, by path."""
    schema = resolved(schema, version)
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= leaves(item, _below(schema, key), version, f"{path}.{key}".lstrip("."))
        return found
    keys = list_keys(schema)
    if isinstance(value, list) and keys:
        found = {}
        for item in value:
            name = ",".join(f"{key}={item.get(key)}" for key in keys)
            found |= leaves(item, schema.get("items") or {}, version, f"{path}[{name}]")
        return found
    return {path: value}


def check_conflicts(mine: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    """Refuse a value that another manager has set otherwise."""
    for manager, theirs in others.items():
        clashes = [f".{p}" for p in mine if p in theirs and theirs[p] != mine[p] and p not in _IDENTITY]
        if clashes:
            causes = [
                {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": f} for f in clashes
            ]
            what = f"Apply failed with {len(clashes)} conflict{'s' * (len(clashes) > 1)}"
            raise ApiError(
                409, "Conflict", f'{what}: conflict with "{manager}": {", ".join(clashes)}', {"causes": causes}
            )
