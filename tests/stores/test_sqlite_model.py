"""The SQLite store against the plain one, with any size of its cache, and for readers that come back."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from basilica.ports import Store
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.store_contract import a_run
from tests.stores.model import StoreMachine
from tests.support.exploring import examples


class SqliteMachine(StoreMachine):
    store: SqliteStore

    @initialize(cache=st.sampled_from([0, 10_000, 1 << 20]))
    def begin(self, cache: int) -> None:
        self.cache = cache
        self.markers = 0
        self.directory = tempfile.TemporaryDirectory()
        self.loop.run(self.open())

    async def open(self) -> None:
        path = Path(self.directory.name) / "state.db"
        self.store = SqliteStore(path, cache_characters=self.cache, now=lambda: self.time)
        await self.store.open()

    async def close(self) -> None:
        await self.store.close()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "directory"):
            self.directory.cleanup()

    @rule(since=st.integers(0, 20))
    def come_back(self, since: int) -> None:
        self.markers += 1
        marker = f"marker-{self.markers}"
        self.same(lambda store: _pending(store, since, marker))


async def _pending(store: Store, since: int, marker: str) -> list[str]:
    """What a reader that comes back finds waiting, until it meets the marker."""
    changes = store.changes(since)
    found = []
    await store.create(a_run(marker, name=marker, user="eve"))
    await store.delete(marker)
    while (instance := await anext(changes)) != marker:
        found.append(instance)
    await changes.aclose()
    return found


TestSqliteMachine = SqliteMachine.TestCase
TestSqliteMachine.settings = settings(max_examples=examples(30), stateful_step_count=40)
