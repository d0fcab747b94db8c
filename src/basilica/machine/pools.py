"""Threads for work that waits for the disk, in pools of their own: work for one purpose never waits for another's.

The default pool of an event loop is shared by everybody: eight archives that take minutes to unpack would keep the
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
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"basilica-{name}")

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of the call, made by one of the threads. Whoever is cancelled stops waiting for it."""
        context = contextvars.copy_context()
        call = partial(context.run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Begin nothing more. What has begun is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
