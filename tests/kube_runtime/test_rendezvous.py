"""The rendezvous of a run on a cluster: real etcd as well as ours, and a real torchrun that is driven through it."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from basilica.core.spec import Exec
from basilica_testkube import KubeServer
from tests.kube_runtime.plane import SETTINGS, control_plane, sh
from tests.support.agents import TRAIN_WITHOUT_TORCH, Ledger

ETCD = replace(
    SETTINGS,
    rendezvous_command=(
        *("/usr/bin/etcd", "--enable-v2=true", "--data-dir", "etcd", "--name", "keys"),
        *("--listen-client-urls", "http://$(POD_IP):2379", "--advertise-client-urls", "http://$(POD_IP):2379"),
        *("--listen-peer-urls", "http://$(POD_IP):2380", "--initial-advertise-peer-urls", "http://$(POD_IP):2380"),
        *("--initial-cluster", "keys=http://$(POD_IP):2380"),
    ),
)


@pytest.mark.skipif(not Path("/usr/bin/etcd").exists(), reason="there is no etcd on this machine")
def test_real_etcd_serves_a_run_as_ours_does() -> None:
    async def story() -> None:
        with KubeServer() as kube:
            async with control_plane(kube, settings=ETCD) as plane:
                run = await plane.deploy(
                    sh("echo attempt $BASILICA_ATTEMPT; [ $BASILICA_ATTEMPT = 1 ] || exit 3; exec sleep 1000"),
                    (1, 2, 4),
                    max_restarts=1,
                )
                up = await plane.until(run, lambda d: d.status.ready == 2 and all(r.restarts for r in d.status.ranks))
                assert [rank.attempt for rank in up.status.ranks] == [1, 1]
                await plane.scale(run, 3)
                await plane.until(run, lambda d: len(d.status.ranks) == 3 and d.status.ready == 3)
                await plane.scale(run, 1)
                await plane.until_ready(run, 1)
                await plane.end(run)
                assert (await plane.settled(run)).status.phase == "cancelled"

    asyncio.run(story())


def test_torchrun_is_driven_through_a_resize(tmp_path: Path) -> None:
    """Without its driver, torchrun would wait out its last call of thirty seconds after each change."""

    async def story() -> None:
        ledger = Ledger(tmp_path / "ledger")
        (tmp_path / "train.py").write_text(TRAIN_WITHOUT_TORCH)
        torchrun = (
            *(sys.executable, "-u", "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1"),
            *("--rdzv-backend=etcd", "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT", "--rdzv-id=$BASILICA_RDZV_ID"),
            *("--max-restarts=10", str(tmp_path / "train.py"), str(ledger.folder)),
        )
        with KubeServer() as kube:
            async with control_plane(kube) as plane:
                env = {"LINGER": "0.5", "AGENT": "0"}
                run = await plane.deploy(Exec(torchrun), (1, 2, 4), env=env)
                await asyncio.to_thread(ledger.first_step, 2, 0.0)
                changed = time.time()
                await plane.scale(run, 3)
                grown = await asyncio.to_thread(ledger.first_step, 3, changed)
                (ledger.folder / "stop").touch()
                assert (await plane.settled(run)).status.phase == "succeeded"
                print(f"a third agent took part after {grown - changed:.1f} s")

    asyncio.run(story())
