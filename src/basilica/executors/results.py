"""Results that remote replicas stored in the rendezvous (see `diloco/replica_entrypoint.py`)."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

from basilica.diloco.replica_entrypoint import local_path, object_store, result_key
from basilica.executors.environment import RENDEZVOUS_URI
from basilica.executors.protocol import FAILED, SUCCEEDED, ReplicaHandle, ReplicaResult

READS_AT_ONCE = 16


class StoredResult(TypedDict, total=False):
    """The document of one replica: its exit code, and its result or its error."""

    job: str | None
    rank: int
    exit_code: int
    result: Any
    error: str


def add_stored_results(handles: Sequence[ReplicaHandle], results: Sequence[ReplicaResult], *, gang_key: str) -> None:
    """Set the result of each replica that ended to its stored one; without one, to the URI of the rendezvous.

    `gang_key` is the key of the gang in the metadata of handles.
    """
    places: dict[tuple[str | None, str], list[int]] = {}
    for place, handle in enumerate(handles):
        if results[place]["status"] in (SUCCEEDED, FAILED):
            gang = (handle.metadata.get(RENDEZVOUS_URI), str(handle.metadata.get(gang_key, "")))
            places.setdefault(gang, []).append(place)
    for (uri, gang_name), mine in places.items():
        stored = read_results(uri, gang_name, [handles[place].rank for place in mine])
        for place in mine:
            results[place]["result"] = stored.get(handles[place].rank, {}).get("result", uri)


def read_results(uri: str | None, job: str, ranks: Iterable[int]) -> dict[int, StoredResult]:
    """Return the stored results by rank, without those of another gang at the same place.

    `OSError` and the store's own errors are raised: a missing result and a store that cannot be read are not the same.
    """
    if not uri or uri.startswith("memory:"):
        return {}
    directory = local_path(uri)
    if directory is not None:
        return _ours(job, ((rank, _read_file(str(directory / result_key(rank)))) for rank in ranks))
    store = object_store(uri)
    import obstore  # noqa: PLC0415  after `object_store`, whose error names the package to install

    def read(rank: int) -> bytes | None:
        try:
            return bytes(obstore.get(store, result_key(rank)).bytes())
        except FileNotFoundError:
            return None

    wanted = list(ranks)
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        return _ours(job, zip(wanted, pool.map(read, wanted), strict=True))


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _ours(job: str, found: Iterable[tuple[int, bytes | None]]) -> dict[int, StoredResult]:
    results = {}
    for rank, data in found:
        if data is None:
            continue
        document: StoredResult = json.loads(data)
        if document.get("job") in (None, job):
            results[rank] = document
    return results
