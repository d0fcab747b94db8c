"""What was acknowledged survives a power cut: the system calls say so, whatever the code says."""

import pytest

from tests.support.system_calls import Call, traced

WRITER = """
import asyncio, os, sys
from dataclasses import replace
from pathlib import Path
from basilica.core.deployment import Deployment
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from basilica.stores.sqlite.store import SqliteStore

def acknowledge(what):
    os.write(1, f"ACK {what}\\n".encode())

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    spec = DeploymentSpec(name="x", program=Exec(("true",)), world=WorldSize(1, 1, 1))
    status = DeploymentStatus(created_at=1.0)
    run = Deployment(instance="x-1", user="ann", namespace="u-ann", spec=spec, status=status, version=0)
    run = await store.create(run)
    acknowledge("create")
    run = await store.change_spec("x-1", lambda d: d.spec.ended_by(Wanted.CANCEL))
    acknowledge("change_spec")
    run = await store.save_status(run, replace(run.status, message="ended", settled=True), now=2.0)
    acknowledge("save_status")
    await store.delete("x-1")
    acknowledge("delete")
    os._exit(0)  # as in a crash: what is written at a clean end does not count

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    folder = tmp_path_factory.mktemp("durable")
    return traced(WRITER, folder, [folder / "state.db"])


@pytest.mark.parametrize("what", ["create", "change_spec", "save_status", "delete"])
def test_a_write_is_on_the_disk_before_it_is_acknowledged(calls: list[Call], what: str) -> None:
    said = [n for n, call in enumerate(calls) if call.writes and '"ACK ' in call.rest]
    acknowledged = next(n for n in said if f'"ACK {what}\\n"' in calls[n].rest)
    before = max((n for n in said if n < acknowledged), default=0)
    # The mark beside the database is written once a second at most: it only tells that something was lost.
    ours = [n for n in range(before, acknowledged) if calls[n].writes and not calls[n].path.endswith(".mark")]
    written = [n for n in ours if "state.db" in calls[n].path]
    assert written, f"{what} wrote nothing"
    last = written[-1]
    synced = [call for call in calls[last:acknowledged] if call.syncs and call.path == calls[last].path]
    assert synced, f"{what} was acknowledged with {calls[last].path} in memory only"
