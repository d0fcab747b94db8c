"""Workers of a real torchrun report by themselves, and the one that hangs is found."""

import asyncio
import sys
from pathlib import Path

import pytest

from basilica.core import stalls
from basilica.core.reports import SeriesQuery
from basilica.core.seen import Stalled
from basilica.core.spec import Exec
from tests.runtime_local.machine import Machine

NO_STALL = Stalled(since=0.0, usual_step_seconds=0.0)
TRAIN = """
import os, time, basilica
worker = int(os.environ["LOCAL_RANK"])
def hangs():
    while not os.path.exists(os.path.join(os.environ["BASILICA_CHECKPOINT_DIR"], "on")):
        time.sleep(0.01)
for step in range(60):
    basilica.report(step=step, loss=worker + 1 / (step + 1))
    time.sleep(0.02)
    if step == 30 and worker == 1:
        hangs()
"""


async def test_workers_of_torchrun(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(stalls, "FLOOR", 1.0)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    async with machine.control_plane() as runtime:
        run = machine.run(Exec(command), env={"OMP_NUM_THREADS": "1"})
        await machine.launch(run)
        async with asyncio.timeout(60):  # torchrun alone takes seconds to start
            while (seen := await machine.seen(run)) is None or "hangs (" not in (seen.stalled or NO_STALL).stack:
                await asyncio.sleep(0.05)
        (machine.layout.checkpoints(run.instance) / "on").touch()
        assert (await machine.until_ended(run)).exit_code == 0
        found = await runtime.series(run, SeriesQuery(points=2000))
        assert [(s.worker, len(s.points)) for s in found] == [(0, 60), (1, 60)]
        told = (await runtime.reports(run))[0]
        assert told.values["loss"] == 1 / 60  # of worker 0
