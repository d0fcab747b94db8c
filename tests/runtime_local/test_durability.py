"""How a rank ended survives a power cut: its record is on the disk, and so is the record's name."""

from pathlib import Path

from tests.support.system_calls import traced

ONE_RANK = """
import asyncio, sys
from pathlib import Path
from basilica.core.actions import Launch
from basilica.core.seen import Sight
from basilica.core.spec import DeploymentSpec, Exec
from basilica.core.world import WorldSize
from basilica.ports import Run
from basilica.runtimes.local.gpus import GpuInventory
from basilica.runtimes.local.runtime import LocalRuntime

async def main():
    woken = asyncio.Event()
    runtime = LocalRuntime(Path(sys.argv[1]), gpus=GpuInventory())
    await runtime.start(lambda instance: woken.set())
    spec = DeploymentSpec(name="x", program=Exec(("true",)), world=WorldSize(1, 1, 1))
    run = Run(instance="x-1", user="ann", namespace="u-ann", created_at=0.0, spec=spec)
    await runtime.observe(run)
    await runtime.launch(run, [Launch(0, 0, 1)])
    while not any(rank.sight is Sight.ENDED for rank in (await runtime.observe(run)).ranks):
        await woken.wait()
        woken.clear()
    await runtime.close()

asyncio.run(main())
"""


def test_the_exit_of_a_rank_and_the_name_of_its_record_reach_the_disk(tmp_path: Path) -> None:
    calls = traced(ONE_RANK, tmp_path, [tmp_path / "state"])
    told = [n for n, call in enumerate(calls) if call.writes and r"\"what\": \"exit\"" in call.rest]
    assert len(told) == 1, [calls[n] for n in told]
    (exit,) = told
    after = [call for call in calls[exit:] if call.pid == calls[exit].pid and call.syncs]
    record, directory = (call.path for call in after[:2])
    assert record.endswith("/0.record") or ".record." in record, after
    assert directory == str(Path(record).parent), after
