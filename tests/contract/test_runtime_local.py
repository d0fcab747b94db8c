"""The local runtime keeps the contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from basilica.ports import Runtime
from basilica.runtimes.local.gpus import GpuInventory
from basilica.runtimes.local.runtime import LocalRuntime
from basilica.testing import RuntimeContract


class TestLocalRuntime(RuntimeContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Runtime]:
        yield LocalRuntime(directory, gpus=GpuInventory())
