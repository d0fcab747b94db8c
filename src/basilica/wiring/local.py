"""The composition root of one machine: a store in SQLite, ranks as processes."""

import asyncio
import contextlib
import functools
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from basilica.controller.plane import Settings
from basilica.core.damage import Trouble
from basilica.core.errors import BasilicaError
from basilica.machine.clocks import SteadyClock, keep_clock, open_clock
from basilica.machine.inotify import TAKEN_AWAY, FileWatcher
from basilica.machine.places import STATE_FILE
from basilica.machine.state_dir import StateDirectory, tighten, unsafe
from basilica.machine.stray_runs import find_stray_runs, trouble_of, trouble_of_damage, trouble_of_loss
from basilica.runtimes.local import capabilities
from basilica.runtimes.local.run_as import User, closed_to, find_user
from basilica.runtimes.local.runtime import LocalRuntime
from basilica.server.serve import CannotServe, Listen, Parts, register_key, serve
from basilica.stores.sqlite.keys import SqliteKeys
from basilica.stores.sqlite.store import SqliteStore

log = logging.getLogger("basilica.server")

examine_machine = capabilities.examine_machine


def prepare_state_dir(path: Path) -> Path:
    """Create the directory if it is absent, and check that this user, and no other, can write to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        problem = unsafe(path)
    except OSError as error:
        raise CannotServe(
            f"cannot use the state directory {path}: {error.strerror}; choose another --state-dir"
        ) from error
    if problem is not None:
        raise CannotServe(f"refusing to use the state directory {path}: {problem}")
    return path.resolve()


@contextlib.asynccontextmanager
async def open_keys(state_dir: Path) -> AsyncIterator[SqliteKeys]:
    """Open the API keys, beside a running server or without one."""
    keys = SqliteKeys(prepare_state_dir(state_dir) / STATE_FILE)
    await keys.open()
    try:
        yield keys
    finally:
        await keys.close()


async def _continue_clock(state_dir: Path, store: SqliteStore) -> SteadyClock:
    """Return the clock of this state directory, which continues after the newest timestamp of a live run."""
    clock = open_clock(state_dir)
    for instance in await store.live():
        with contextlib.suppress(BasilicaError):  # an unreadable run is reported by its own turn
            clock.not_before((await store.get(instance)).status.latest)
    return clock


def _keep_clock(state_dir: Path, clock: SteadyClock) -> None:
    """Persist the clock. A full disk must not stop the server: the next one then starts from the wall clock."""
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
    *,
    run_as: str | None = None,
) -> None:
    """Serve the control plane of one machine: SQLite and processes; ranks run as the user `run_as`, if given."""
    state_dir = prepare_state_dir(state_dir)
    user = None if run_as is None else _user_of_ranks(run_as, state_dir)
    tighten(state_dir)
    state = StateDirectory(state_dir, (STATE_FILE, "runs"))
    state.open()
    store = SqliteStore(
        state_dir / STATE_FILE,
        admit=state.admit,
        release=state.reserve.release,
        log_bytes_ahead=state.reserve.size,
    )
    await store.open()
    try:
        await _log_losses(state, store)
        async with open_keys(state_dir) as keys:
            clock = await _continue_clock(state_dir, store)
            await register_key(keys, clock, api_key)
            runtime = LocalRuntime(state_dir, clock=clock, reserve=state.reserve, run_as=user)
            keep = functools.partial(_keep_clock, state_dir, clock)
            keep()

            def troubles() -> list[Trouble]:
                damaged = len(store.damaged)
                return [*state.troubles(), *([trouble_of_damage(damaged)] if damaged else [])]

            with _watching(state):
                parts = Parts(store, keys, runtime, clock, settings, keep_clock=keep, troubles=troubles)
                await serve(parts, listen, state_dir, announce)
    finally:
        await store.close()


def _user_of_ranks(name: str, state_dir: Path) -> User:
    """Return the user; `CannotServe` with the reason if ranks cannot run as that user."""
    try:
        user = find_user(name)
        closed = closed_to(user, state_dir)
    except (ValueError, OSError) as error:
        raise CannotServe(f"cannot run ranks as {name!r}: {error}") from error
    if closed is not None:
        raise CannotServe(
            f"cannot run ranks as {name!r}: that user may not enter {closed}, which leads to the state directory; "
            "choose another --state-dir, such as /var/lib/basilica"
        )
    return user


async def _log_losses(state: StateDirectory, store: SqliteStore) -> None:
    """Log every loss and damage that happened while no server ran."""
    known = await store.instances()
    try:
        (state.path / "runs").mkdir(mode=0o700, exist_ok=True)
        state.watch_over()
        if store.lost is not None:
            state.lost(trouble_of_loss(*store.lost))
        strays = await asyncio.to_thread(find_stray_runs, state.path, known)
    except OSError as error:
        raise CannotServe(f"cannot take up what is in {state.path}: {error}") from error
    if strays:
        state.found(trouble_of(strays))
    for trouble in state.troubles():
        log.error("%s: %s; %s", trouble.kind, trouble.message, trouble.remedy)


@contextlib.contextmanager
def _watching(state: StateDirectory) -> Iterator[None]:
    """Log an error at once when the directory disappears under the server."""
    logged: list[str] = []

    def check() -> None:
        gone = state.gone()
        if gone is not None and not logged:
            logged.append(gone)
            log.error("%s: no new runs are taken, and what is recorded now may be lost", gone)

    files = FileWatcher()
    forget = files.watch(str(state.path), check, TAKEN_AWAY)
    try:
        yield
    finally:
        forget()
        files.close()
