"""The in-memory store keeps the contract that it stands in for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from basilica.ports import Keys, Store
from basilica.stores.memory import MemoryKeys, MemoryStore
from basilica.testing.store_contract import KeysContract, StoreContract


class TestMemoryStore(StoreContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Store]:
        yield MemoryStore()


class TestMemoryKeys(KeysContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Keys]:
        yield MemoryKeys()
