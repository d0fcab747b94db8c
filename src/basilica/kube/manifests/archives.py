"""Manifests of an uploaded directory (archive): objects of the user's namespace, and volumes of the pods that use it.
Pure.

Its tar.gz is cut into immutable ConfigMaps. An index names the whole and is written last: parts without an index do not
count.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from basilica.core import environment as env
from basilica.kube.manifests.userdeployment import GROUP

Json = dict[str, Any]

MANAGED_BY, ROLE = "app.kubernetes.io/managed-by", f"{GROUP}/role"
PART, INDEX = "archive-part", "archive"
ALL = f"{MANAGED_BY}=basilica,{ROLE} in ({PART},{INDEX})"
INDEXES = f"{MANAGED_BY}=basilica,{ROLE}={INDEX}"
ARCHIVE = f"{GROUP}/archive"  # a label: as much of the digest as a label holds
DIGEST, BYTES, WANTED_AT = f"{GROUP}/archive-digest", f"{GROUP}/archive-bytes", f"{GROUP}/wanted-at"
PART_BYTES = 900 << 10  # an object of Kubernetes holds 1 MiB; in the names, so that another size has others
NAME_DIGITS, LABEL_DIGITS = 32, 63

SENT_AT, UNPACKED_AT = "/opt/basilica-archive", "/workdir"
DIRECTORY = "code"  # in the volume: the directory is made whole or not at all, and the volume always exists


def index_name(digest: str) -> str:
    return f"basilica-archive-{digest[:NAME_DIGITS]}"


def part_name(digest: str, number: int) -> str:
    return f"{index_name(digest)}-{PART_BYTES >> 10}k-{number}"


def parts_of(digest: str) -> str:
    """Return the label selector of the parts."""
    return f"{MANAGED_BY}=basilica,{ROLE}={PART},{ARCHIVE}={digest[:LABEL_DIGITS]}"


def path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}".rstrip("/")


def part(namespace: str, digest: str, number: int, content: bytes, now: float) -> Json:
    body = _config_map(namespace, part_name(digest, number), PART, digest, {WANTED_AT: moment(now)})
    return body | {"binaryData": {"part": base64.b64encode(content).decode()}}


def index(namespace: str, digest: str, size: int, parts: int, now: float) -> Json:
    annotations = {WANTED_AT: moment(now), BYTES: str(size)}
    body = _config_map(namespace, index_name(digest), INDEX, digest, annotations)
    return body | {"data": {"digest": digest, "bytes": str(size), "parts": str(parts)}}


def moment(now: float) -> str:
    """Format the time. It changes with every write, and so does the object's version: retention cannot delete a part
    that was just written again.
    """
    return f"{now:.6f}"


def _config_map(namespace: str, name: str, role: str, digest: str, annotations: Mapping[str, str]) -> Json:
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": {MANAGED_BY: "basilica", ROLE: role, ARCHIVE: digest[:LABEL_DIGITS]},
        "annotations": {DIGEST: digest, **annotations},
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True}


def parts_in(found: Mapping[str, Any], digest: str) -> int | None:
    """Return how many parts the index names; None if it is that of another archive, or none."""
    data = found.get("data") or {}
    if data.get("digest") != digest or not str(data.get("parts", "")).isdecimal():
        return None
    return int(data["parts"])


# ---- in the pods of a run --------------------------------------------------------------------------------------------


def volumes(digest: str, parts: int) -> list[Json]:
    """Return the volumes. Parts are optional for Kubernetes: a rank with a missing part starts, and reports it, instead
    of waiting for it.
    """
    sources = [
        {
            "configMap": {
                "name": part_name(digest, number),
                "optional": True,
                "items": [{"key": "part", "path": f"{number:04d}"}],
            }
        }
        for number in range(parts)
    ]
    sent = {"projected": {"sources": sources}} if sources else {"emptyDir": {}}
    return [{"name": "archive", **sent}, {"name": "workdir", "emptyDir": {}}]


def mounts() -> list[Json]:
    return [
        {"name": "archive", "mountPath": SENT_AT, "readOnly": True},
        {"name": "workdir", "mountPath": UNPACKED_AT},
    ]


def environment(digest: str, parts: int, workdir: str | None) -> dict[str, str]:
    """Return the entrypoint's variables; ranks do not get to see them. See `basilica.rank.workdir`."""
    return {
        env.ARCHIVE: digest,
        env.ARCHIVE_PARTS: str(parts),
        env.ARCHIVE_SENT: SENT_AT,
        env.ARCHIVE_UNPACKED: f"{UNPACKED_AT}/{DIRECTORY}",
        env.ARCHIVE_WORKDIR: workdir or "",
    }


def slices(content: bytes) -> Sequence[bytes]:
    return [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
