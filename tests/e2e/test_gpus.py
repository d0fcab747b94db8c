"""Real GPUs, on a machine that has one: each is given to one rank at a time, and who waits is told behind whom."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.server import Json, ended, phase_is, run_request, serving, wait_for

pytestmark = [
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="this machine has no NVIDIA GPU"),
]
TELL = "import os; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))"
USE = "import torch; x = torch.ones(8, device='cuda'); print(torch.cuda.device_count(), x.sum().item())"


def _gpus(**wish: object) -> Json:
    return {"resources": {"gpus": {"count": 1, "model": [], **wish}}}


def test_a_rank_gets_its_gpu_and_the_next_run_waits_in_line(tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        holder = run_request("holder", f'{sys.executable} -c "{TELL}"; while [ ! -e done ]; do sleep 0.1; done')
        holder |= {"workdir": str(tmp_path), **_gpus()}
        first = client.post("/deployments", json=holder).json()["instanceName"]
        wait_for(client, "holder", phase_is("ready"))
        client.post("/deployments", json=run_request("next", f'{sys.executable} -c "{USE}"', **_gpus()))
        waiting = wait_for(client, "next", lambda b: "held by" in b["distributed"]["blockedOn"])
        assert first in waiting["distributed"]["blockedOn"]
        client.post("/deployments", json=run_request("last", "true", **_gpus()))
        wait_for(client, "last", lambda b: "behind 'next'" in b["distributed"]["blockedOn"])

        (tmp_path / "done").touch()
        assert wait_for(client, "holder", ended)["phase"] == "succeeded"
        assert client.get("/deployments/holder/logs", params={"rank": 0}).text == "sees 0\n"
        done = wait_for(client, "next", ended)
        assert done["phase"] == "succeeded", client.get("/deployments/next/logs").text
        assert "1 8.0" in client.get("/deployments/next/logs", params={"rank": 0}).text
        assert wait_for(client, "last", ended)["phase"] == "succeeded"
        assert done["distributed"]["usage"]["gpuSeconds"] > 0


def test_a_model_that_is_not_here_keeps_the_run_pending_and_why_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        client.post("/deployments", json=run_request("picky", "true", **_gpus(model=["TPU-v9"])))
        run = wait_for(client, "picky", lambda b: "TPU-v9" in b["distributed"]["blockedOn"])
        assert run["phase"] == "pending"
