"""The SQLite store keeps the contract, served from memory and, without its cache, from the file."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from basilica.ports import Keys, Store
from basilica.stores.sqlite.cache import CACHE_CHARACTERS
from basilica.stores.sqlite.keys import SqliteKeys
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.store_contract import KeysContract, StoreContract
from basilica.testing.store_contract.damage import Part


class TestSqliteStore(StoreContract):
    cache_characters = CACHE_CHARACTERS

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Store]:
        store = SqliteStore(directory / "state.db", cache_characters=self.cache_characters)
        await store.open()
        yield store
        await store.close()

    async def damage(self, store: Store, instance: str, part: Part) -> None:
        assert isinstance(store, SqliteStore)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
            (row,) = connection.execute("SELECT id FROM deployments WHERE instance = ?", (instance,)).fetchone()
            if part == "spec":
                connection.execute("UPDATE specs SET spec = '{\"name\": 7' WHERE deployment = ?", (row,))
            else:  # not even text, in a column that must be
                connection.execute("UPDATE deployments SET status = CAST(x'7bff' AS TEXT) WHERE id = ?", (row,))
        store._cache.drop(instance)


class TestSqliteStoreWithoutCache(TestSqliteStore):
    cache_characters = 0


class TestSqliteKeys(KeysContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Keys]:
        keys = SqliteKeys(directory / "state.db")
        await keys.open()
        yield keys
        await keys.close()
