"""From a path to what it is about."""

from dataclasses import dataclass

from basilica_testkube.errors import no_such_path
from basilica_testkube.http import Request
from basilica_testkube.kinds import Kind, KindTable

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True)
class Route:
    """A request as the API understands it."""

    verb: str  # get, list, watch, create, update, patch, delete or deletecollection
    kind: Kind
    namespace: str
    name: str
    subresource: str

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


def route(request: Request, kinds: KindTable) -> Route:
    """Find what a request is about; 404 if there is no such thing."""
    parts = request.path.strip("/").split("/")
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise no_such_path()
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3:
        raise no_such_path()
    kind = kinds.find(group, version, rest[0])
    if kind is None or (namespace and not kind.namespaced):
        raise no_such_path()
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    return Route(_verb(request, name), kind, namespace, name, subresource)


def _verb(request: Request, name: str) -> str:
    if request.method == "GET":
        if request.query.get("watch", "").lower() in ("1", "true"):
            return "watch"
        return "get" if name else "list"
    if request.method == "DELETE":
        return "delete" if name else "deletecollection"
    try:
        return _VERBS[request.method]
    except KeyError:
        raise no_such_path() from None
