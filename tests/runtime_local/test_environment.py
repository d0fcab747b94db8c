"""What a rank finds in its environment, and what never leaves the server's memory."""

import json
import os

import pytest

from basilica.core.spec import Exec, Gpus, Resources
from basilica.core.world import WorldSize
from basilica.machine.proc import read_file
from tests.runtime_local.machine import Machine, python, sh

PRINT = python("import json, os; print(json.dumps(dict(os.environ)))")


async def environment(machine: Machine, **spec: object) -> dict[str, str]:
    run = machine.run(PRINT, **spec)  # type: ignore[arg-type]
    ended = await machine.outcome(run)
    assert ended.exit_code == 0
    variables = json.loads("".join((await machine.runtime.tail(run, 0, None)).lines))
    assert isinstance(variables, dict)
    return variables


async def test_the_contract_is_whole(machine: Machine) -> None:
    async with machine.control_plane(node="node-7"):
        env = await environment(machine, world=WorldSize(1, 2, 4), rendezvous_backend="c10d")
    port = int(env["MASTER_PORT"])
    contract = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "NODE_NAME": "node-7",
        "BASILICA_DEPLOYMENT": "train-x",
        "BASILICA_NAME": "train",
        "BASILICA_RANK": "0",
        "BASILICA_ATTEMPT": "1",
        "BASILICA_WORLD_MIN": "1",
        "BASILICA_WORLD_TARGET": "2",
        "BASILICA_WORLD_MAX": "4",
        "BASILICA_GPUS_PER_POD": "1",
        "BASILICA_RDZV_ID": "train-x",
        "BASILICA_RDZV_BACKEND": "c10d",
        "BASILICA_CHECKPOINT_DIR": str(machine.layout.checkpoints("train-x")),
        "PYTHONUNBUFFERED": "1",
    }
    assert {name: env.get(name) for name in contract} == contract
    host, _, rendezvous = env["BASILICA_RDZV_ENDPOINT"].partition(":")
    assert host == "127.0.0.1"
    assert 1024 < int(rendezvous) != port > 1024
    assert "CUDA_VISIBLE_DEVICES" not in env


async def test_the_user_wins_over_the_machine_and_the_contract_over_the_user(machine: Machine) -> None:
    async with machine.control_plane():
        env = await environment(
            machine,
            env={"HOME": "/mine", "RANK": "9", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1", "PYTHONUNBUFFERED": ""},
            nccl_env={"NCCL_DEBUG": "INFO", "HOME": "/nccl"},
            secrets={"TOKEN": "s3cret"},
        )
    assert (env["HOME"], env["RANK"], env["NCCL_DEBUG"], env["TOKEN"]) == ("/mine", "0", "INFO", "s3cret")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["PYTHONUNBUFFERED"]) == ("10.0.0.1", "1", "")


async def test_the_servers_own_environment_stays_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASILICA_API_KEY", "the-servers-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-servers-too")
    async with machine.control_plane() as runtime:
        env = await environment(machine)
        fork_server = read_file(f"/proc/{runtime._fork_server.pid}/environ")
    assert not {"BASILICA_API_KEY", "AWS_SECRET_ACCESS_KEY"} & env.keys()
    assert env["PATH"] == os.environ["PATH"]
    assert b"the-servers" not in fork_server


async def test_no_variable_is_ever_written_to_disk(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("exit 1"), env={"PUBLIC": "canary-env"}, secrets={"TOKEN": "canary-secret"})
        await machine.outcome(run)
    kept = [path for path in machine.state_dir.rglob("*") if path.is_file()]
    assert len(kept) >= 3
    assert not [path for path in kept if b"canary" in path.read_bytes()]


async def test_ports_and_checkpoints_outlive_an_attempt_and_differ_between_runs(machine: Machine) -> None:
    script = 'echo $MASTER_PORT $BASILICA_RDZV_ENDPOINT; cd "$BASILICA_CHECKPOINT_DIR"; cat step; echo 7 > step'
    async with machine.control_plane():
        run, other = machine.run(sh(script)), machine.run(sh(script), name="other")
        first = await machine.outcome(run)
        elsewhere = await machine.outcome(other)
    async with machine.control_plane():
        await machine.launch(run, attempt=2)
        second = await machine.until_ended(run, attempt=2)
    assert second.log_tail == (first.log_tail[0], "7")
    assert first.log_tail[0] != elsewhere.log_tail[0]


async def test_arguments_arrive_as_they_were_given(machine: Machine) -> None:
    async with machine.control_plane():
        shell = await machine.outcome(machine.run(sh('printf "%s|" "$0" "$@"', "a b", "$HOME", "ü*", "")))
        direct = await machine.outcome(machine.run(Exec(("printf", "%s|", "a b", "$HOME", "ü*", "")), name="direct"))
    assert shell.log_tail == ("--|a b|$HOME|ü*||",)
    assert direct.log_tail == ("a b|$HOME|ü*||",)


async def test_a_large_environment_arrives_whole_at_every_rank(machine: Machine) -> None:
    env = {f"V{n}": "x" * 1000 for n in range(900)}
    async with machine.control_plane():
        run = machine.run(python("import os; print(sum(k[0] == 'V' for k in os.environ))"), env=env)
        await machine.launch(run, *range(8))
        for rank in range(8):
            assert (await machine.until_ended(run, rank)).log_tail == ("900",)


async def test_the_client_default_of_one_gpu_runs_on_the_cpu_with_a_warning(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("exit 0"), resources=Resources(gpus=Gpus(1)))
        assert (await machine.outcome(run)).exit_code == 0
        sighting = await runtime.observe(run)
    problem = "asked for 1 GPU per rank; this machine has none: ranks run on the CPU"
    assert sighting.warnings == (("GPUsUnavailable", problem),)
