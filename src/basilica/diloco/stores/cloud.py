"""S3, GCS, Azure and what else obstore knows. It is opened on first use, so that a process may fork before that."""

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from basilica.diloco.effects import Found, Range

LARGEST_CREATED = 5000 << 20
"""S3 and Azure take no more in a single request, and only a single one can be on condition that nothing is there."""

_used_by: set[int] = set()
"""The process that uses obstore. Its threads are not there in a child, which would wait for them for ever."""


class CloudStore:
    first_pause = 0.05
    longest_pause = 2.0
    piece_bytes = 16 << 20
    parallel = 16

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self._uri, self._options = uri, options
        self._opened: Any = None
        self._opening = threading.Lock()

    def _store(self) -> Any:
        if _used_by and os.getpid() not in _used_by:
            raise RuntimeError(
                f"this process was forked from one that had used {self._uri}, and obstore does not work after that; "
                "fork before the first all-reduce, or start processes by spawn"
            )
        with self._opening:
            if self._opened is None:
                _used_by.add(os.getpid())
                self._opened = open_cloud(self._uri, self._options)
        return self._opened

    def put(self, key: str, size: int, buffers: Iterable[memoryview]) -> None:
        import obstore  # noqa: PLC0415

        obstore.put(self._store(), key, _joined(size, buffers))

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        import obstore  # noqa: PLC0415

        if size > LARGEST_CREATED:
            raise ValueError(
                f"{key} would have {size / 1e9:.1f} GB, and one request creates at most {LARGEST_CREATED / 1e9:.1f}; "
                "give DiLoCo more `fragments`, or the all-reduce a smaller `wire`"
            )
        try:
            obstore.put(self._store(), key, _joined(size, buffers), mode="create", use_multipart=False)
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError, FileExistsError):
            return False
        return True

    def read(self, range: Range) -> memoryview | None:
        import obstore  # noqa: PLC0415

        if not range.length:
            return memoryview(b"")
        try:
            data = memoryview(obstore.get_range(self._store(), range.key, start=range.start, length=range.length))
        except FileNotFoundError:
            return None
        except obstore.exceptions.GenericError:
            # A range that begins behind the end of an object is refused: the object is shorter than it should be.
            if self._size(range.key) > range.start:
                raise
            return memoryview(b"")
        if range.into is None:
            return data
        range.into[: len(data)] = data
        return range.into[: len(data)]

    def _size(self, key: str) -> int:
        import obstore  # noqa: PLC0415

        return int(obstore.head(self._store(), key)["size"])

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        import obstore  # noqa: PLC0415

        # Object stores list below a path: the rest of the prefix is compared here.
        directory = prefix.rpartition("/")[0]
        rows = obstore.list(self._store(), directory or None, offset=after or None).collect()
        found = (
            Found(row["path"], row["size"]) for row in rows if row["path"].startswith(prefix) and row["path"] > after
        )
        return tuple(sorted(found, key=lambda f: f.key))

    def delete(self, keys: Sequence[str]) -> None:
        import obstore  # noqa: PLC0415

        if keys:
            obstore.delete(self._store(), list(keys))

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        time.sleep(seconds)


def open_cloud(uri: str, options: Mapping[str, Any]) -> Any:
    """obstore's own store behind a URI. An endpoint without TLS, as of a server in the same network, is believed."""
    try:
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError as error:
        raise RuntimeError(f"{uri} needs obstore: pip install 'basilica[diloco]'") from error
    endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint.startswith("http://"):
        options = {**options, "client_options": {"allow_http": True, **options.get("client_options", {})}}
    return from_url(uri, **options)


def _joined(size: int, buffers: Iterable[memoryview]) -> bytearray:
    """A single request needs a single buffer."""
    data = bytearray(size)
    at = 0
    for buffer in buffers:
        data[at : at + len(buffer)] = buffer
        at += len(buffer)
    return data
