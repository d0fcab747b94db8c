"""What the server says of itself: versions, groups and their resources."""

from basilica_testkube.kinds import Kind, KindTable
from basilica_testkube.values import Json

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_MORE = {"pods": ("log", "eviction"), "namespaces": ("finalize",)}


def discover(path: str, kinds: KindTable, version: str) -> Json | None:
    """The answer to a discovery request, or None if it is none."""
    parts = path.strip("/").split("/")
    if parts == ["version"]:
        major, minor, *_ = version.split(".")
        made = {
            "buildDate": "1970-01-01T00:00:00Z",
            "compiler": "",
            "goVersion": "",
            "gitCommit": "",
            "gitTreeState": "clean",
        }
        return {"major": major, "minor": minor, "gitVersion": f"v{version}", "platform": "linux/amd64", **made}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        names = sorted({kind.group for kind in kinds.all() if kind.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name, kinds) for name in names]}
    if parts == ["api", "v1"]:
        return _resources("", "v1", kinds)
    if parts[0] == "apis" and len(parts) == 2:
        return _group(parts[1], kinds) if any(kind.group == parts[1] for kind in kinds.all()) else None
    if parts[0] == "apis" and len(parts) == 3:
        return _resources(parts[1], parts[2], kinds)
    return None


def _group(name: str, kinds: KindTable) -> Json:
    versions = sorted({kind.version for kind in kinds.all() if kind.group == name})
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": listed, "preferredVersion": listed[0]}


def _resources(group: str, version: str, kinds: KindTable) -> Json | None:
    found = [kind for kind in kinds.all() if (kind.group, kind.version) == (group, version)]
    if not found:
        return None
    listed = [entry for kind in found for entry in _entries(kind)]
    group_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": listed}


def _entries(kind: Kind) -> list[Json]:
    common = {"namespaced": kind.namespaced, "kind": kind.kind}
    main = {"name": kind.plural, "singularName": kind.kind.lower(), **common, "verbs": _VERBS}
    if kind.short:
        main["shortNames"] = list(kind.short)
    parts = [*(("status",) if kind.status else ()), *(_MORE.get(kind.plural, ()) if not kind.group else ())]
    below = [
        {"name": f"{kind.plural}/{part}", "singularName": "", **common, "verbs": ["get", "patch", "update"]}
        for part in parts
    ]
    if kind.scale is not None:
        scale = {"group": "autoscaling", "version": "v1", **common, "kind": "Scale"}
        below.append({"name": f"{kind.plural}/scale", "singularName": "", **scale, "verbs": ["get", "patch", "update"]})
    return [main, *below]
