"""The custom resource `UserDeployment` of a run: its names in the API, and its spec to and from the core's.

The spec of the resource is the body of `POST /deployments`, field for field, with three differences: the name is the
object's own unless `name` is given, secrets are a reference to a Secret, and the API's routes cancel and restart are
fields that only ever go one way. Deletion is Kubernetes' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from basilica.core.errors import ValidationError
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.wire.spec import TABLE, Option, from_body, to_body

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
REQUESTED = f"{GROUP}/requested"  # events of requests, written with the change itself

RANKS_MAX = 4096  # so that the status of a run fits into one object, however its ranks ended
_UID_LETTERS = 8


def path_of(namespace: str, name: str = "", subresource: str = "") -> str:
    """Return the API path of the objects of a namespace, of one of them, or of a subresource."""
    parts = (f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}", name, subresource)
    return "/".join(part for part in parts if part)


def instance_of(obj: Json) -> str:
    """Return the instance name: the object's own if the API made it, else with letters of its uid, so that it is unique
    for ever although people reuse names, also in several namespaces.
    """
    metadata = obj["metadata"]
    name = str(metadata["name"])
    made_as = (metadata.get("annotations") or {}).get(MADE_AS)
    return name if made_as == f"{metadata['namespace']}/{name}" else f"{name}-{metadata['uid'][:_UID_LETTERS]}"


def owner_reference(obj: Json) -> Json:
    """Return the reference with which Kubernetes deletes another object together with this one."""
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
    """Format a time as Kubernetes does: to the second."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- its spec and the core's -----------------------------------------------------------------------------------------


def options_of_resource(table: Sequence[Option] = TABLE) -> tuple[Option, ...]:
    """Return the options of the resource, without secrets: nobody should read them in an object."""
    about = "What the run is called; the object's name by default."
    mine = (option for option in table if option.attribute != "secrets")
    return tuple(replace(o, path="name", about=about) if o.attribute == "name" else o for o in mine)


OPTIONS = options_of_resource()


def body_of(spec: DeploymentSpec, *, secret: str | None = None, options: Sequence[Option] = OPTIONS) -> Json:
    """Return the resource's spec, with the defaults written out."""
    own: Json = {"cancel": spec.wanted is not Wanted.RUN, "freshStarts": spec.gang}
    return to_body(spec, options) | own | ({} if secret is None else {"secretRef": {"name": secret}})


def secret_of(obj: Json) -> str | None:
    """Return the name of the Secret whose keys are variables of the ranks."""
    reference = (obj.get("spec") or {}).get("secretRef") or {}
    return reference.get("name")


def spec_of(
    obj: Json,
    secrets: Mapping[str, str] | None = None,
    options: Sequence[Option] = OPTIONS,
    spec: type[DeploymentSpec] = DeploymentSpec,
) -> DeploymentSpec:
    """Return the core's spec; `ValidationError` where an object that its schema let pass is none."""
    try:
        metadata, body = obj["metadata"], obj["spec"]
        beside = {
            "secrets": dict(secrets or {}),
            "wanted": _wanted(metadata, body),
            "generation": int(metadata["generation"]),
            "gang": int(body.get("freshStarts") or 0),
        }
        return from_body(body | {"name": body.get("name") or metadata["name"]}, options, spec, **beside)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise
        raise ValidationError("spec", type(error).__name__, f"cannot be read: {error}") from error


def _wanted(metadata: Json, body: Json) -> Wanted:
    if metadata.get("deletionTimestamp"):
        return Wanted.DELETE
    return Wanted.CANCEL if body.get("cancel") else Wanted.RUN
