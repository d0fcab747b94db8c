"""Objects in S3, GCS, Azure or another store of obstore. It is opened on first use: a process may fork before that.

**Outages.** A store that has answered once is expected to recover: requests that fail for want of an answer are retried
for as long as the replicas would wait for each other. A retried create may find the object that its first try wrote,
and answers that the key exists: so every creator must read the stored object in any case.

**Slow links.** A write may take as long as its bytes need on a slow link; a read only has to make progress.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from basilica.diloco.background import Background
from basilica.diloco.effects import Found, Range
from basilica.diloco.stores.answers import in_words, will_pass
from basilica.version import pip_install

T = TypeVar("T")
log = logging.getLogger("basilica.diloco")

LARGEST_CREATED = 5000 << 20
"""The limit of S3 and Azure for a single request, and only a single request can be conditional on an absent key."""
SLOWEST_UPLOAD = 100e3
"""Bytes a second; a slower upload counts as hung."""
SHORTEST_UPLOAD = 64.0
"""Seconds that even the smallest write may take."""
STALLED = timedelta(seconds=60)
"""A read without a new byte for so long counts as hung."""
LONGEST_READ = timedelta(days=1)
PAUSES = (1.0, 10.0)
"""Seconds between two requests to a store that does not answer: the first pause, which doubles, and the longest."""

_has_answered: set[tuple[str, str]] = set()
"""Buckets, with their endpoints, that have answered this process."""
_used_by: set[int] = set()
"""The process that uses obstore. A forked child lacks its threads, and would wait for them for ever."""


class CloudStore:
    first_pause = 0.05
    longest_pause = 2.0
    piece_bytes = 16 << 20
    parallel = 16

    def __init__(self, uri: str, options: dict[str, Any], patience: float = 0.0) -> None:
        self._uri, self._options, self._patience = uri, options, patience
        self._opened: dict[timedelta, Any] = {}
        self._opening = threading.Lock()
        self._bucket = (urlsplit(uri)._replace(path="").geturl(), str(options.get("endpoint")))
        self._background = Background("basilica-store", self.parallel)

    def put(self, key: str, size: int, buffers: Iterable[memoryview]) -> None:
        obstore = _obstore(self._uri)
        data = _joined(size, buffers)
        self._answer(lambda: obstore.put(self._writer(size), key, data))

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        obstore = _obstore(self._uri)
        if size > LARGEST_CREATED:
            raise ValueError(
                f"{key} would have {size / 1e9:.1f} GB, and one request creates at most {LARGEST_CREATED / 1e9:.1f}; "
                "give DiLoCo more `fragments`, or the all-reduce a smaller `wire`"
            )
        data = _joined(size, buffers)

        def create() -> bool:
            try:
                obstore.put(self._writer(size), key, data, mode="create", use_multipart=False)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError, FileExistsError):
                return False
            return True

        return self._answer(create)

    def read(self, range: Range) -> memoryview | None:
        obstore = _obstore(self._uri)
        if not range.length:
            return memoryview(b"")

        def get() -> memoryview:
            try:
                return memoryview(obstore.get_range(self._reader(), range.key, start=range.start, length=range.length))
            except obstore.exceptions.GenericError:
                # The store refuses a range that begins beyond the end of an object: the object is too short.
                if int(obstore.head(self._reader(), range.key)["size"]) > range.start:
                    raise
                return memoryview(b"")

        try:
            data = self._answer(get)
        except FileNotFoundError:
            return None
        if range.into is None:
            return data
        range.into[: len(data)] = data
        return range.into[: len(data)]

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        obstore = _obstore(self._uri)
        # Object stores list below a path: the rest of the prefix is compared here.
        directory = prefix.rpartition("/")[0]
        rows = self._answer(lambda: obstore.list(self._reader(), directory or None, offset=after or None).collect())
        found = (
            Found(row["path"], row["size"]) for row in rows if row["path"].startswith(prefix) and row["path"] > after
        )
        return tuple(sorted(found, key=lambda f: f.key))

    def delete(self, keys: Sequence[str]) -> None:
        obstore = _obstore(self._uri)
        if keys:
            # Only housekeeping deletes, and retries later: no replica should wait for that.
            self._answer(lambda: obstore.delete(self._reader(), list(keys)), patience=0.0)

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        time.sleep(seconds)

    def _reader(self) -> Any:
        return self._store(LONGEST_READ, read_timeout=STALLED)

    def _writer(self, size: int) -> Any:
        """Return a store for writes of this size. Timeouts are powers of two apart, so that a run opens few stores."""
        seconds = SHORTEST_UPLOAD
        while seconds < size / SLOWEST_UPLOAD:
            seconds *= 2
        return self._store(timedelta(seconds=seconds))

    def _store(self, timeout: timedelta, **more: Any) -> Any:
        """Return obstore's own store with this request timeout."""
        if _used_by and os.getpid() not in _used_by:
            raise RuntimeError(
                f"this process was forked from one that had used {self._uri}, and obstore does not work after that; "
                "fork before the first all-reduce, or start processes by spawn"
            )
        with self._opening:
            if timeout not in self._opened:
                _used_by.add(os.getpid())
                client = {"timeout": timeout, **more, **self._options.get("client_options", {})}
                self._opened[timeout] = open_cloud(self._uri, {**self._options, "client_options": client})
            return self._opened[timeout]

    def _answer(self, call: Callable[[], T], patience: float | None = None) -> T:
        """Run a call with retries, never in the main thread: it handles signals only after a call into obstore."""
        waits = self._patience if patience is None else patience
        if threading.current_thread() is not threading.main_thread():
            return self._repeated(call, waits)
        answer: Future[T] = self._background.submit(self._repeated, call, waits)
        return answer.result()

    def _repeated(self, call: Callable[[], T], patience: float) -> T:
        """Retry a call until the store answers; at most for `patience` seconds, and only if it has ever answered."""
        obstore = _obstore(self._uri)
        failing_since: float | None = None
        pause, longest = PAUSES
        while True:
            try:
                answer = call()
            except obstore.exceptions.GenericError as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                patient = self._bucket in _has_answered and now - failing_since < patience
                if not patient or not will_pass(error) or self._background.stopped.is_set():
                    raise ConnectionError(f"{self._uri} {in_words(error)}") from error
                log.warning("%s %s; trying again", self._uri, in_words(error))
            else:
                _has_answered.add(self._bucket)
                return answer
            self._background.stopped.wait(pause)
            pause = min(2 * pause, longest)


def open_cloud(uri: str, options: Mapping[str, Any]) -> Any:
    """Open obstore's own store behind a URI. An endpoint without TLS is accepted: it may be in the same network."""
    obstore = _obstore(uri)
    endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint.startswith("http://"):
        options = {**options, "client_options": {"allow_http": True, **options.get("client_options", {})}}
    try:
        return obstore.store.from_url(uri, **options)
    except obstore.exceptions.GenericError as error:
        raise ValueError(f"{uri!r} cannot be opened: {str(error).partition(chr(10))[0]}") from None


def _obstore(uri: str) -> Any:
    """Import obstore, an optional package."""
    try:
        import obstore.store  # noqa: PLC0415
    except ImportError as error:
        raise RuntimeError(f"{uri} needs obstore: {pip_install('diloco')}") from error
    return obstore


def _joined(size: int, buffers: Iterable[memoryview]) -> bytearray:
    """Return the buffers as one: a single request needs a single buffer."""
    data = bytearray(size)
    at = 0
    for buffer in buffers:
        data[at : at + len(buffer)] = buffer
        at += len(buffer)
    return data
