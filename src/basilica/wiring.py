"""The composition root: the one module that names concrete adapters."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from basilica.places import STATE_FILE
from basilica.runtimes.local.runtime import LocalRuntime
from basilica.server.control import Settings
from basilica.server.serve import CannotServe, Listen, Parts, SystemClock, serve, take_key
from basilica.stores.keys import SqliteKeys
from basilica.stores.sqlite import SqliteStore


def prepare_state_dir(path: Path) -> Path:
    """Make the directory if need be, and be sure that it can be written."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CannotServe(
            f"cannot use the state directory {path}: {error.strerror}; choose another --state-dir"
        ) from error
    return path.resolve()


@contextlib.asynccontextmanager
async def open_keys(state_dir: Path) -> AsyncIterator[SqliteKeys]:
    """The API keys, beside a running server or without one."""
    keys = SqliteKeys(prepare_state_dir(state_dir) / STATE_FILE)
    await keys.open()
    try:
        yield keys
    finally:
        await keys.close()


async def serve_embedded(
    listen: Listen,
    state_dir: Path,
    settings: Settings,
    api_key: str | None,
    announce: Callable[[str], None],
) -> None:
    """The control plane of one machine: SQLite and processes."""
    state_dir = prepare_state_dir(state_dir)
    store = SqliteStore(state_dir / STATE_FILE)
    await store.open()
    try:
        async with open_keys(state_dir) as keys:
            clock = SystemClock()
            await take_key(keys, clock, api_key)
            runtime = LocalRuntime(state_dir)
            await serve(Parts(store, keys, runtime, clock, settings), listen, state_dir, announce)
    finally:
        await store.close()
