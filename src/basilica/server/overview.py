"""The stream of all runs of a user as server-sent events: states, not differences. It costs nothing while no run
changes."""

import asyncio
from collections.abc import AsyncGenerator

from basilica.controller.plane import ControlPlane
from basilica.core.damage import DamagedRun
from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentDamaged, DeploymentNotFound
from basilica.core.names import namespace_of
from basilica.server.streams import KEEP_ALIVE_SECONDS, cancel
from basilica.wire.console import RunChanges, RunRow, render_damaged_row, render_row

BATCH = 50  # after each batch, other tasks of the loop have their turn
PACE_SECONDS = 0.1  # between events, however fast runs change; changes in between are folded into one state


async def watch_all(plane: ControlPlane, user: str, since: int, closing: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """Yield the runs that changed after version `since`, with the names of all runs; then every change.

    An event has an id, after which a reader can resume, only when it completes all changes up to that version.
    """
    names = plane.store.changes()  # first, so that no change falls between the list and the subscription
    step = asyncio.ensure_future(anext(names, None))
    ending = asyncio.ensure_future(closing.wait())
    try:
        found = await plane.listed(user)
        mine = {d.instance for d in found}
        newer = sorted((d for d in found if d.version > since), key=lambda d: d.version)
        version = max([since, *(d.version for d in newer)])
        everyone: list[str] | None = sorted(mine)
        for start in range(0, max(len(newer), 1), BATCH):
            rows = [await _row(plane, d) for d in newer[start : start + BATCH]]
            complete = start + BATCH >= len(newer) and not step.done()
            yield _event(RunChanges(runs=rows, deleted=[], all=everyone), version if complete else None)
            everyone = None
            await asyncio.sleep(0)
        while True:
            either: set[asyncio.Future[object]] = {step, ending}  # type: ignore[arg-type]
            await asyncio.wait(either, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return
            if not step.done():
                yield b": still here\n\n"
                continue
            changed: list[str] = []
            while step.done() and len(changed) < BATCH:
                name = step.result()
                if name is None:  # the store is closed
                    return
                changed.append(name)
                step = asyncio.ensure_future(anext(names, None))
                await asyncio.sleep(0)  # lets the task finish if another name is there already
            rows, deleted = [], []
            for name in changed:
                try:
                    deployment: Deployment | DamagedRun = await plane.store.get(name)
                except DeploymentDamaged as error:
                    deployment = error.run
                except DeploymentNotFound:
                    if name in mine:  # else it was another user's run
                        mine.discard(name)
                        deleted.append(name)
                    continue
                if deployment.namespace == namespace_of(user):
                    mine.add(name)
                    version = max(version, deployment.version)
                    rows.append(await _row(plane, deployment))
            if rows or deleted:
                yield _event(RunChanges(runs=rows, deleted=deleted), None if step.done() else version)
                await asyncio.sleep(PACE_SECONDS)
    finally:
        await cancel(step, ending)
        await names.aclose()


async def _row(plane: ControlPlane, deployment: Deployment | DamagedRun) -> RunRow:
    if isinstance(deployment, DamagedRun):
        return render_damaged_row(deployment)
    last = await plane.store.events(deployment.instance, limit=1)
    shown, event = plane.shown(deployment), plane.shown(last[0]) if last else None
    return render_row(shown, event, plane.now(), plane.unattended())


def _event(changes: RunChanges, version: int | None) -> bytes:
    id_line = b"" if version is None else b"id: %d\n" % version
    return b"event: runs\n%sdata: %s\n\n" % (id_line, changes.to_json())
