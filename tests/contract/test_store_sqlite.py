"""The SQLite store keeps the contract, served from memory and, without its cache, from the file."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from basilica.ports import Keys, Store
from basilica.stores.cache import CACHE_CHARACTERS
from basilica.stores.keys import SqliteKeys
from basilica.stores.sqlite import SqliteStore
from basilica.testing.store_contract import KeysContract, StoreContract


class TestSqliteStore(StoreContract):
    cache_characters = CACHE_CHARACTERS

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Store]:
        store = SqliteStore(directory / "state.db", cache_characters=self.cache_characters)
        await store.open()
        yield store
        await store.close()


class TestSqliteStoreWithoutCache(TestSqliteStore):
    cache_characters = 0


class TestSqliteKeys(KeysContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Keys]:
        keys = SqliteKeys(directory / "state.db")
        await keys.open()
        yield keys
        await keys.close()
