"""Uploaded directories (archives), kept in the users' namespaces as ConfigMaps: any API server can take one, any pod
can mount it.

An archive is whole if it has an index, which is written last. Its age is in an annotation of the index. Retention
deletes exactly the versions that it saw to be old, the index first. A new use touches the index, or, where there is
none, writes every part anew. So an archive that is wanted while it is being deleted stays, or is written again.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from basilica.core.errors import ValidationError
from basilica.core.names import namespace_of
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.namespaces import in_namespace, lacks_rights
from basilica.kube.manifests import archives as objects
from basilica.machine.pools import Pool
from basilica.ports import InUse, StoredArchive
from basilica.runtimes.kubernetes.refusals import refusals
from basilica.shipping.unpack import check, receive

Json = dict[str, Any]

log = logging.getLogger(__name__)

USER_ARCHIVES = 16  # of the largest size: the cluster's database is small, and shared by all users
WRITTEN_AT_ONCE = 4
_checking = Pool("checking", 2)  # a hostile archive may take minutes; a pool of its own keeps that from other requests
ROOM = "leave out what ranks do not need with .gitignore, or put it into the run's image or a bucket"


class ClusterArchives:
    """The archives of all users. `most`: the largest size of one archive, in bytes."""

    def __init__(self, api: KubeApi, most: int) -> None:
        self._api, self._most = api, most

    async def store(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        with tempfile.TemporaryDirectory(prefix="basilica-archive-") as folder:
            draft = Path(folder) / "draft"
            received = await receive(chunks, draft, most=self._most)
            if received.bytes > self._most:
                problem = f"is larger, packed, than the {_mebibytes(self._most)} that Kubernetes can carry: {ROOM}"
                raise ValidationError("archive", _mebibytes(received.bytes), problem)
            await _checking.run(check, draft)
            parts = objects.slices(await asyncio.to_thread(draft.read_bytes))
        with refusals("cannot keep the archive"):
            await self._keep(namespace_of(user), received.digest, parts)
        return StoredArchive(received.digest, received.bytes)

    async def _keep(self, namespace: str, digest: str, parts: Sequence[bytes]) -> None:
        missing = set(range(len(parts)))
        known = await self._touch(namespace, digest)
        if known is None:
            await self._check_room(namespace, sum(map(len, parts)))
        else:
            there = await self._list(objects.path(namespace), objects.parts_of(digest))
            names = {obj["metadata"]["name"] for obj in there}
            missing = {number for number in missing if objects.part_name(digest, number) not in names}
        gate = asyncio.Semaphore(WRITTEN_AT_ONCE)

        async def write(number: int) -> None:
            async with gate:
                await self._apply(namespace, objects.part(namespace, digest, number, parts[number], time.time()))

        await asyncio.gather(*map(write, sorted(missing)))
        if known is None:
            size = sum(map(len, parts))
            await self._apply(namespace, objects.index(namespace, digest, size, len(parts), time.time()))

    async def _apply(self, namespace: str, body: Json) -> None:
        """Apply rather than create: two concurrent writers write the same body, and a lost answer can be retried."""
        path = objects.path(namespace, body["metadata"]["name"])
        await in_namespace(self._api, namespace, lambda: self._api.apply(path, body, force=True))

    async def _check_room(self, namespace: str, size: int) -> None:
        kept = await self._list(objects.path(namespace), objects.INDEXES)
        used = sum(int(_annotation(obj, objects.BYTES) or 0) for obj in kept)
        most = USER_ARCHIVES * self._most
        if used + size > most:
            problem = f"finds {_mebibytes(used)} of other archives, and {_mebibytes(most)} are kept"
            remedy = "delete runs that you do not need any more: their archives go a day later"
            raise ValidationError("archive", _mebibytes(size), f"{problem}; {remedy}")

    async def has(self, user: str, digest: str) -> bool:
        with refusals("cannot look for the archive"):
            return await self._touch(namespace_of(user), digest) is not None

    async def _touch(self, namespace: str, digest: str) -> int | None:
        """Reset the archive's age and return its number of parts; None if it is not there."""
        body = {"metadata": {"annotations": {objects.WANTED_AT: objects.moment(time.time())}}}
        path = objects.path(namespace, objects.index_name(digest))
        try:
            try:
                found = await self._api.merge_patch(path, body)
            except ApiError as error:
                if not lacks_rights(error):
                    raise
                found = await self._api.get(path)  # a namespace that does not exist yet grants no rights
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        return objects.parts_in(found, digest)

    async def parts(self, namespace: str, digest: str) -> int:
        """Return how many parts a run has to mount; 0 if the archive is not there."""
        with refusals("cannot look for the archive"):
            try:
                found = await self._api.get(objects.path(namespace, objects.index_name(digest)))
            except ApiError as error:
                if error.status != 404:
                    raise
                return 0
        return objects.parts_in(found, digest) or 0

    # ---- retention -------------------------------------------------------------------------------------------------

    async def forget(self, in_use: InUse, before: float) -> list[str]:
        """Delete archives that are old and unused, and leftovers of interrupted uploads. One request while nothing is
        old.
        """
        with refusals("cannot remove old archives"):
            found: dict[tuple[str, str], list[Json]] = {}
            for obj in await self._list("/api/v1/configmaps", objects.ALL):
                digest = _annotation(obj, objects.DIGEST)
                found.setdefault((obj["metadata"]["namespace"], digest), []).append(obj)
            old = {key: kept for key, kept in found.items() if _wanted_at(kept) < before}
            used = {(namespace_of(user), digest) for user, digest in await in_use()} if old else set()
            return [key[1] for key, kept in old.items() if key not in used and await self._delete(kept)]

    async def _delete(self, kept: Sequence[Json]) -> bool:
        """Delete the objects, the index first. False if the archive was wanted again meanwhile."""
        for obj in sorted(kept, key=lambda obj: not _is_index(obj)):
            metadata = obj["metadata"]
            path = objects.path(metadata["namespace"], metadata["name"])
            try:
                await self._api.delete(path, uid=metadata["uid"], resource_version=metadata["resourceVersion"])
            except ApiError as error:
                if error.status != 409:
                    raise
                return False
        return True

    async def _list(self, path: str, selector: str) -> list[Json]:
        return (await self._api.list(path, label_selector=selector, only_metadata=True))[0]


def _annotation(obj: Json, annotation: str) -> str:
    return str((obj["metadata"].get("annotations") or {}).get(annotation, ""))


def _is_index(obj: Json) -> bool:
    return bool(obj["metadata"]["labels"][objects.ROLE] == objects.INDEX)


def _wanted_at(kept: Sequence[Json]) -> float:
    """Return the time in the index; without an index, that of the newest part: the upload may still be under way."""
    deciding = [obj for obj in kept if _is_index(obj)] or kept
    return max(_moment(_annotation(obj, objects.WANTED_AT)) for obj in deciding)


def _moment(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
