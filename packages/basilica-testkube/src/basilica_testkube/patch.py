"""The four ways to change an object in part."""

from typing import Any

from basilica_testkube.errors import ApiError, bad_request
from basilica_testkube.schema import definitions
from basilica_testkube.values import Json, copied

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = ("application/apply-patch+yaml", "application/apply-patch+json", "application/apply-patch+cbor")


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386: maps are merged, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return copied(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def strategically_merged(old: Any, patch: Any, schema: Json, version: str) -> Any:
    """A merge patch in which lists that the schema gives a merge key are merged by it."""
    schema = resolved(schema, version)
    if not isinstance(patch, dict):
        return copied(patch)
    if patch.get("$patch") == "replace":
        return {key: copied(value) for key, value in patch.items() if key != "$patch"}
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name) or [] if item not in value]
            continue
        if key.startswith("$"):
            continue  # `$setElementOrder` and `$retainKeys` only order what is there
        below = (schema.get("properties") or {}).get(key) or schema.get("additionalProperties") or {}
        below = below if isinstance(below, dict) else {}
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and below.get("x-kubernetes-patch-strategy", "").startswith("merge"):
            result[key] = _merged_list(result.get(key) or [], value, below, version)
        else:
            result[key] = strategically_merged(result.get(key), value, below, version)
    return result


def _merged_list(old: list[Any], patch: list[Any], schema: Json, version: str) -> list[Any]:
    merge_key = schema.get("x-kubernetes-patch-merge-key")
    if merge_key is None:
        return [*old, *(item for item in patch if item not in old)]
    if any(item.get("$patch") == "replace" for item in patch):
        return [copied(item) for item in patch if "$patch" not in item]
    result = list(old)
    for item in patch:
        if merge_key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {merge_key}")
        place = next((n for n, have in enumerate(result) if have.get(merge_key) == item[merge_key]), None)
        if item.get("$patch") == "delete":
            result = [have for have in result if have.get(merge_key) != item[merge_key]]
        elif place is None:
            result.append(copied(item))
        else:
            result[place] = strategically_merged(result[place], item, schema.get("items") or {}, version)
    return result


def resolved(schema: Json, version: str) -> Json:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Json = definitions(version)[reference.rpartition("/")[2]]
    return found


def json_patched(old: Json, operations: list[Json]) -> Json:
    """RFC 6902."""
    result = copied(old)
    for operation in operations:
        verb, path = operation["op"], _pointer(operation["path"])
        if verb in ("move", "copy"):
            value = copied(_reach(result, _pointer(operation["from"])))
            if verb == "move":
                _remove(result, _pointer(operation["from"]))
            _add(result, path, value)
        elif verb == "add":
            _add(result, path, copied(operation.get("value")))
        elif verb == "remove":
            _remove(result, path)
        elif verb == "replace":
            _reach(result, path)
            _remove(result, path)
            _add(result, path, copied(operation.get("value")))
        elif verb == "test":
            if _reach(result, path) != operation.get("value"):
                raise ApiError(
                    422, "Invalid", f"the server rejected our request: testing path {operation['path']} failed"
                )
        else:
            raise bad_request(f"{verb!r} is no operation of a JSON patch")
    found: Json = result
    return found


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _reach(value: Any, path: list[str]) -> Any:
    try:
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (KeyError, IndexError, ValueError, TypeError):
        raise ApiError(422, "Invalid", f"the server rejected our request: no value at /{'/'.join(path)}") from None
    return value


def _add(value: Any, path: list[str], new: Any) -> None:
    parent, last = _reach(value, path[:-1]), path[-1]
    if isinstance(parent, list):
        parent.insert(len(parent) if last == "-" else int(last), new)
    else:
        parent[last] = new


def _remove(value: Any, path: list[str]) -> None:
    _reach(value, path)
    parent, last = _reach(value, path[:-1]), path[-1]
    parent.pop(int(last) if isinstance(parent, list) else last)
