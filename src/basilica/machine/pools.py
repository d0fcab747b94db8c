"""Thread pools for work that waits for the disk, one for each purpose: no purpose waits for another.

The default pool of an event loop is shared by all: eight archives that take minutes to unpack would keep the
control plane from reading an exit record. So each purpose has a pool, and a bound.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """A bounded number of threads, made when they are needed."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._size = name, threads
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Make the call in one of the threads and return its result. A cancelled caller stops waiting for it."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, thread_name_prefix=f"basilica-{self._name}")
        context = contextvars.copy_context()
        call = partial(context.run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Release the threads: no queued call is begun, and running ones are not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
