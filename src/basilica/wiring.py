"""The composition root: the one module that names concrete adapters."""

import contextlib
import functools
import logging
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from basilica.clocks import SteadyClock, keep_clock, open_clock
from basilica.core.errors import BasilicaError
from basilica.places import STATE_FILE
from basilica.runtimes.local.runtime import LocalRuntime
from basilica.server.control import Settings
from basilica.server.serve import CannotServe, Listen, Parts, serve, take_key
from basilica.stores.keys import SqliteKeys
from basilica.stores.sqlite import SqliteStore

log = logging.getLogger("basilica.server")


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


async def _continue_clock(state_dir: Path, store: SqliteStore) -> SteadyClock:
    """The time line of this state directory, which goes on after the newest moment that a live run has on it."""
    clock = open_clock(state_dir)
    for instance in await store.live():
        with contextlib.suppress(BasilicaError):  # what cannot be read has its own complaint, when its turn comes
            clock.not_before((await store.get(instance)).status.latest)
    return clock


def _keep_clock(state_dir: Path, clock: SteadyClock) -> None:
    """A disk that is full keeps nobody from being served: the next server then asks the wall clock."""
    try:
        keep_clock(state_dir, clock)
    except OSError as error:
        log.warning("cannot keep the clock's zero in %s: %s", state_dir, error.strerror)


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
            clock = await _continue_clock(state_dir, store)
            await take_key(keys, clock, api_key)
            runtime = LocalRuntime(state_dir, clock=clock)
            keep = functools.partial(_keep_clock, state_dir, clock)
            keep()
            await serve(Parts(store, keys, runtime, clock, settings, keep_clock=keep), listen, state_dir, announce)
    finally:
        await store.close()
