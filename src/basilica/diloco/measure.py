"""The measurement of an object store's speed from this machine, for the planner."""

import os
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from basilica.diloco.effects import Range
from basilica.diloco.plan import StoreSpeed
from basilica.diloco.stores.port import ObjectStore

SMALL_REQUESTS = 12
OBJECT_BYTES = 16 << 20
OBJECTS = 4


def measure(store: ObjectStore, *, object_bytes: int = OBJECT_BYTES, objects: int = OBJECTS) -> StoreSpeed:
    """Small requests one by one, large objects several at once. What it writes is removed again."""
    prefix = f"bench-{secrets.token_hex(4)}"
    small = [f"{prefix}/small-{n}" for n in range(SMALL_REQUESTS)]
    large = [f"{prefix}/large-{n}" for n in range(objects)]
    data = memoryview(os.urandom(object_bytes))
    try:
        put = [_timed(partial(store.put_if_absent, key, 64, iter([data[:64]]))) for key in small]
        get = [_timed(partial(store.read, Range(key, 0, 64))) for key in small]
        look = [_timed(partial(store.list, f"{prefix}/")) for _ in small]
        with ThreadPoolExecutor(objects) as threads:
            up = _timed(lambda: list(threads.map(lambda key: store.put(key, len(data), iter([data])), large)))
            down = _timed(lambda: list(threads.map(lambda key: store.read(Range(key, 0, len(data))), large)))
    finally:
        store.delete([*small, *large])
    return StoreSpeed(
        put_seconds=statistics.median(put),
        get_seconds=statistics.median(get),
        list_seconds=statistics.median(look),
        up_bytes_per_second=objects * object_bytes / up,
        down_bytes_per_second=objects * object_bytes / down,
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-9)
