"""A deployed function under torchrun: from `scale()` to the workers of the new world, and the exception of one."""

import contextlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import basilica
from tests.support.agents import ALL_REDUCE, PATIENCE, Ledger
from tests.support.server import serving

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, Any] = {
    "gpu_count": 0,
    "env": {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    "grace_seconds": 30,
    "delete_on_exit": True,
}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[basilica.BasilicaClient]:
    with serving(tmp_path / "state") as server, basilica.BasilicaClient(server.url, server.key) as made:
        yield made


def train(folder: str) -> int:
    import os
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with open(f"{folder}/steps", "a", buffering=1) as ledger:
        while True:
            numbers = torch.tensor([rank + 1.0, float(os.path.exists(f"{folder}/stop"))])
            try:
                dist.all_reduce(numbers)
            except RuntimeError:  # a peer left, and we are about to be told
                time.sleep(2)
                raise
            name = os.environ["BASILICA_RANK"]
            ledger.write(f"{time.time()} {world} {rank} {numbers[0].item():g} {restarts} {name}\n")
            if numbers[1].item():
                break
            time.sleep(0.05)
    dist.destroy_process_group()
    return world


def test_a_function_trains_on_while_its_world_is_scaled(client: basilica.BasilicaClient, tmp_path: Path) -> None:
    steps = Ledger(tmp_path / "run")
    with client.deploy_distributed(
        None,
        source=train,
        source_args=[str(steps.folder)],
        world_size=basilica.WorldSize(2, 2, 4),
        launcher="torchrun",
        **OPTIONS,
    ) as training:
        steps.first_step(2, 0)
        for size in (4, 3):
            began = time.time()
            training.scale(target=size)
            steps.first_step(size, began)
        (steps.folder / "stop").touch()
        assert training.join(PATIENCE).ready == 3
        assert {rank: value for rank, value in training.results().items() if rank < 3} == {0: 3, 1: 3, 2: 3}
        assert {step.restarts for step in steps.steps()} == {0}, training.logs()
        assert [step for step in steps.steps() if step.sum != step.world * (step.world + 1) / 2] == []


def add_up(folder: str, definitions: str) -> None:
    """Train without torch, where no worker is to fall: `definitions` is ALL_REDUCE."""
    import os
    import time

    names: dict[str, Any] = {}
    exec(definitions, names)
    all_reduce, rank, world = names["all_reduce"], names["rank"], names["world"]
    restarts, name = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["BASILICA_RANK"]
    with open(f"{folder}/steps", "a", buffering=1) as ledger:
        while True:
            try:
                total, stop = all_reduce([rank + 1, float(os.path.exists(f"{folder}/stop"))])
            except (OSError, RuntimeError):  # a peer left, and we are about to be told
                time.sleep(2)
                raise
            ledger.write(f"{time.time()} {world} {rank} {total:g} {restarts} {name}\n")
            if stop:
                break
            time.sleep(0.05)


def deploy(client: basilica.BasilicaClient, steps: Ledger, world: basilica.WorldSize) -> basilica.DistributedTraining:
    """`add_up` under torchrun, on a world of that size."""
    arguments = [str(steps.folder), ALL_REDUCE]
    return client.deploy_distributed(
        None, source=add_up, source_args=arguments, world_size=world, launcher="torchrun", **OPTIONS
    )


OWN_TORCHRUN = [
    *("torchrun", "--nnodes=$BASILICA_WORLD_MIN:$BASILICA_WORLD_MAX", "--nproc-per-node=1", "--max-restarts=10"),
    *("--rdzv-backend=etcd", "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT", "--rdzv-id=$BASILICA_RDZV_ID"),
]


def deploy_own(
    client: basilica.BasilicaClient, steps: Ledger, world: basilica.WorldSize
) -> basilica.DistributedTraining:
    """The same by a command line of the user's own, in which nothing is ours."""
    script = steps.folder / "train.py"
    call = f"add_up({str(steps.folder)!r}, {ALL_REDUCE!r})"
    script.write_text(f"from typing import Any\n\n{inspect.getsource(add_up)}\n\n{call}\n")
    return client.deploy_distributed(None, command=[*OWN_TORCHRUN, str(script)], world_size=world, **OPTIONS)


@pytest.mark.parametrize("deploy", [deploy, deploy_own])
def test_training_outlives_its_rendezvous(
    client: basilica.BasilicaClient, tmp_path: Path, deploy: Callable[..., basilica.DistributedTraining]
) -> None:
    """It is killed under the agents, which would not stand a refusal; who asks meanwhile waits instead."""
    steps = Ledger(tmp_path / "run")
    with deploy(client, steps, basilica.WorldSize(2, 2, 3)) as training:
        steps.first_step(2, 0)
        for _ in range(3):
            _replace_rendezvous(tmp_path / "state", steps)
        began = time.time()
        training.scale(target=3)
        steps.first_step(3, began)
        (steps.folder / "stop").touch()
        assert training.join(PATIENCE).ready == 3
        assert [rank.restarts for rank in training.ranks] == [0, 0, 0]
        assert {step.restarts for step in steps.steps()} == {0}, training.logs()


def _replace_rendezvous(state: Path, steps: Ledger) -> None:
    lock = state / "rendezvous" / "lock"  # has the pid of whoever holds it
    pid = lock.read_text()
    os.kill(int(pid), signal.SIGKILL)
    steps.until(lambda: lock.read_text() not in ("", pid), "new rendezvous")


@pytest.mark.parametrize("whole", [True, False], ids=["the agent and its worker", "the agent alone"])
def test_a_killed_agent_costs_the_workers_of_the_others_nothing(
    client: basilica.BasilicaClient, tmp_path: Path, whole: bool
) -> None:
    """Each loss makes the workers of its peer fall, whose agent has no restart to spend."""
    steps = Ledger(tmp_path / "run")
    losses = 2 if whole else 1
    options = {**OPTIONS, "max_restarts": losses, "launcher": "torchrun"}
    world = basilica.WorldSize(2, 2, 2)
    with client.deploy_distributed(
        None, source=train, source_args=[str(steps.folder)], world_size=world, **options
    ) as training:
        for _ in range(losses):
            steps.first_step(2, time.time())
            _kill_agent(training.name, rank=1, whole=whole)
        steps.first_step(2, time.time())
        (steps.folder / "stop").touch()
        training.join(PATIENCE)
        assert [rank.restarts for rank in training.ranks] == [0, losses], training.logs()
        assert {step.restarts for step in steps.steps()} == {0}, training.logs()


def _kill_agent(instance: str, *, rank: int, whole: bool) -> None:
    """The torchrun agent of a rank: the parent of the process that has torchelastic's variables."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                raw = (entry / "environ").read_bytes().split(b"\0")
                environment = dict(pair.decode(errors="replace").partition("=")[::2] for pair in raw)
                mine = environment.get("BASILICA_DEPLOYMENT") == instance
                if mine and environment.get("BASILICA_RANK") == str(rank) and "TORCHELASTIC_RUN_ID" in environment:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    found[int(entry.name)] = parent
    worker, agent = next((pid, parent) for pid, parent in found.items() if parent not in found)
    for pid in (worker, agent) if whole else (agent,):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def always_fails(folder: str) -> None:
    import os

    with open(f"{folder}/starts", "a") as starts:
        starts.write(os.environ["BASILICA_RANK"] + "\n")
    raise ArithmeticError("it never works")


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_script_that_always_raises_ends_the_run_after_its_budget(
    client: basilica.BasilicaClient, tmp_path: Path, max_restarts: int
) -> None:
    options = {**OPTIONS, "max_restarts": max_restarts, "launcher": "torchrun"}
    world = basilica.WorldSize(2, 2, 2)
    training = client.deploy_distributed(
        None, source=always_fails, source_args=[str(tmp_path)], world_size=world, **options
    )
    with training:
        with pytest.raises(basilica.BelowMinimumWorld, match="ArithmeticError: it never works"):
            training.join(PATIENCE)
        assert training.culprit is not None
        assert training.culprit.traceback.endswith("\nArithmeticError: it never works")
        starts = (tmp_path / "starts").read_text().split()
        most = max(starts.count("0"), starts.count("1"))
        assert most == max_restarts + 1, starts
        restarted = [event for event in training.events() if event.reason == "RankRestarted"]
        assert len(restarted) >= max_restarts


def raises_on_rank_1(folder: str) -> None:
    import os
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with open(f"{folder}/starts", "a") as starts:
        starts.write(os.environ["BASILICA_RANK"] + "\n")
    for step in range(10_000):
        if step == 3 and os.environ["BASILICA_RANK"] == "1":
            raise ArithmeticError("rank 1 never works")
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)


def test_the_rank_whose_worker_raised_pays_and_is_the_culprit_not_those_that_fell_with_it(
    client: basilica.BasilicaClient, tmp_path: Path
) -> None:
    options = {**OPTIONS, "max_restarts": 1, "launcher": "torchrun"}
    world = basilica.WorldSize(2, 2, 2)
    training = client.deploy_distributed(
        None, source=raises_on_rank_1, source_args=[str(tmp_path)], world_size=world, **options
    )
    with training:
        with pytest.raises(basilica.BelowMinimumWorld, match="ArithmeticError: rank 1 never works"):
            training.join(PATIENCE)
        assert training.culprit is not None
        assert training.culprit.rank == 1
        assert [rank.restarts for rank in training.ranks] == [0, 1], training.logs()
        assert (tmp_path / "starts").read_text().split().count("1") == 2


def fails() -> None:
    import os

    if os.environ["RANK"] == "1":
        raise OverflowError("rank 1 has had enough")


def test_the_exception_of_the_worker_that_raised_is_told(client: basilica.BasilicaClient) -> None:
    world = basilica.WorldSize(2, 2, 2)
    training = client.deploy_distributed(
        None, source=fails, world_size=world, launcher="torchrun --max-restarts=0", **OPTIONS
    )
    with training:
        with pytest.raises(basilica.BelowMinimumWorld, match="OverflowError: rank 1 has had enough"):
            training.join(PATIENCE)
        assert training.culprit is not None
        assert training.culprit.traceback.endswith("\nOverflowError: rank 1 has had enough")
        assert "in fails" in training.culprit.traceback
