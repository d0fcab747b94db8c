"""Volumes of pods as folders of this machine.

A process has no mounts of its own. So a variable, a word of the command or a working directory that is a path in a
mount is given as the path in the folder that stands for the mount. An `emptyDir` lives as long as its pod.
"""

import base64
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from basilica_testkube.environment import ConfigError, Lookup
from basilica_testkube.kinds import CONFIG_MAPS, SECRETS, Kind
from basilica_testkube.values import Json

_FILE_MODE = 0o644


class MountError(ConfigError):
    """The container is not made before its volumes are there."""

    reason = "ContainerCreating"


class Mounts:
    """Where the paths of a container are on this machine."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = sorted(folders.items(), key=lambda entry: -len(entry[0]))  # the innermost first

    def path(self, text: str) -> str:
        """The text as it is, unless it is a path in a mount."""
        for mount, folder in self._folders:
            if text == mount or text.startswith(f"{mount}/"):
                return f"{folder}{text[len(mount) :]}"
        return text


def mounts(pod: Json, container: Json, folder: Path, lookup: Lookup) -> Mounts:
    """Provide what the container mounts, in a folder of its pod. Volumes that need a real node are left out."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    found: dict[str, Path] = {}
    for mount in container.get("volumeMounts") or []:
        place = _provided(volumes.get(mount["name"]) or {}, folder / "volumes" / mount["name"], lookup)
        if place is not None:
            found[mount["mountPath"].rstrip("/")] = place / mount.get("subPath", "")
    return Mounts(found)


def _provided(volume: Json, place: Path, lookup: Lookup) -> Path | None:
    if "emptyDir" in volume:
        place.mkdir(parents=True, exist_ok=True)
        return place
    sources = [volume, *(volume.get("projected") or {}).get("sources", [])]
    filled = [source for source in sources if "configMap" in source or "secret" in source]
    if not filled and "projected" not in volume:
        return None
    files = dict(entry for source in filled for entry in _files(source, lookup))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for path, (content, mode) in files.items():
        file = place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
    return place


def _files(source: Json, lookup: Lookup) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Paths in the volume with contents and modes."""
    kind, about = (CONFIG_MAPS, source["configMap"]) if "configMap" in source else (SECRETS, source["secret"])
    name = about.get("secretName") or about["name"]
    obj = lookup(kind, name)
    if obj is None and not about.get("optional"):
        raise MountError(f'MountVolume.SetUp failed: {kind.kind.lower()} "{name}" not found')
    contents = {} if obj is None else _contents(kind, obj)
    mode = about.get("defaultMode", _FILE_MODE)
    items = about.get("items") or [{"key": key, "path": key} for key in contents]
    for item in items:
        if item["key"] in contents:
            yield item["path"], (contents[item["key"]], item.get("mode", mode))
        elif not about.get("optional"):
            raise MountError(f"MountVolume.SetUp failed: references non-existent config key: {item['key']}")


def _contents(kind: Kind, obj: Json) -> dict[str, bytes]:
    texts, encoded = obj.get("data") or {}, obj.get("binaryData") or {}
    if kind == SECRETS:
        texts, encoded = {}, texts
    found = {key: text.encode() for key, text in texts.items()}
    return found | {key: base64.b64decode(value) for key, value in encoded.items()}
