"""Logs of containers, as files that are read from their end, from their start, or while they grow."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from basilica_testkube.errors import bad_request
from basilica_testkube.http import Reply
from basilica_testkube.kubelet import Kubelet
from basilica_testkube.values import Json, containers_of, meta

_LOOK_EVERY_S = 0.05
_PLAIN = {"Content-Type": "text/plain"}


def serve_log(kubelet: Kubelet, pod: Json, query: dict[str, str]) -> Reply:
    """The answer to GET .../log."""
    name = container_of(pod, query)
    previous = query.get("previous", "").lower() in ("1", "true")
    path = kubelet.log_path(pod, name, previous=previous)
    if path is None:
        raise bad_request(_why_none(pod, name, previous=previous))
    tail = int(query["tailLines"]) if query.get("tailLines") else None
    if query.get("follow", "").lower() in ("1", "true") and not previous:
        return Reply(200, _followed(path, tail, lambda: kubelet.is_writing(pod, name)), _PLAIN)
    text = last_lines(path, tail)
    limit = int(query["limitBytes"]) if query.get("limitBytes") else None
    return Reply(200, text if limit is None else text[:limit], _PLAIN)


def last_lines(path: Path, count: int | None, most: int = 16 << 20) -> bytes:
    """The end of a file; at most `most` bytes of it are looked at."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return _tail(file.read(), count)


def _tail(text: bytes, count: int | None) -> bytes:
    if count is None:
        return text
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else b""


def container_of(pod: Json, query: dict[str, str]) -> str:
    """The container that is asked for; it may go unnamed if it is the only one."""
    name = query.get("container") or _only_container(pod)
    if name not in {container["name"] for container in containers_of(pod)}:
        raise bad_request(f"container {name} is not valid for pod {meta(pod)['name']}")
    return name


def _only_container(pod: Json) -> str:
    names = [container["name"] for container in pod["spec"]["containers"]]
    if len(names) > 1:
        listed = " ".join(names)
        raise bad_request(f"a container name must be specified for pod {meta(pod)['name']}, choose one of: [{listed}]")
    found: str = names[0]
    return found


def _why_none(pod: Json, name: str, *, previous: bool) -> str:
    where = f'container "{name}" in pod "{meta(pod)["name"]}"'
    if previous:
        return f"previous terminated {where} not found"
    statuses = pod.get("status", {}).get("containerStatuses") or []
    state: Json = next((status["state"] for status in statuses if status["name"] == name), {})
    return f"{where} is waiting to start: {state.get('waiting', {}).get('reason', 'ContainerCreating')}"


def _from(path: Path, place: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(place)
        return file.read()


async def _followed(path: Path, tail: int | None, is_writing: Callable[[], bool]) -> AsyncIterator[bytes]:
    start = _from(path, 0)
    place = len(start)
    yield _tail(start, tail)
    while True:
        last_look = not is_writing()
        more = _from(path, place)
        place += len(more)
        yield more
        if last_look:
            return
        await asyncio.sleep(_LOOK_EVERY_S)
