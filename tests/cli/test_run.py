"""`basilica run`, as people use it."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from basilica.machine.places import start_of
from basilica.testing.executor_contract import until
from basilica_testkube import KubeServer
from tests.support.server import Command, cli, cli_afresh
from tests.support.terminal import CTRL_C, at_terminal

JOB = """
import os, sys, time
from pathlib import Path

def main(steps=1, culprit=None):
    print("step", steps, flush=True)
    if int(os.environ["REPLICA_RANK"]) == culprit:
        sys.exit(7)
    return {"steps": steps}

def complain_and_leave():
    # the rank that leaves first writes what executors write of others
    rank = int(os.environ["REPLICA_RANK"])
    time.sleep(0.5 * (1 - rank))
    if rank == 1:
        sys.exit("rank 0 failed first")
    sys.exit(9)

def write(characters):
    return "x" * characters

def refuse_to_end(place):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold(place)

def hold(place):
    Path(place, f"pid-{os.environ['REPLICA_RANK']}").write_text(str(os.getpid()))
    time.sleep(100)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "my_job.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"BASILICA_STATE_DIR": str(tmp_path / "state")}


def pids(directory: Path, count: int) -> list[int]:
    """Of replicas that hold."""
    until(lambda: len(list(directory.glob("pid-*"))) == count)
    until(lambda: all(path.read_text() for path in directory.glob("pid-*")))
    return [int(path.read_text()) for path in directory.glob("pid-*")]


def test_what_each_replica_returned(job: Path, env: dict[str, str]) -> None:
    done = cli("run", f"{job}:main", "-n", "2", "--arg", "steps=3", env=env)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert lines[0] == ["RANK", "STATUS", "CODE", "RESULT"]
    assert lines[1:] == [[rank, "succeeded", "0", '{"steps": 3}'] for rank in ("0", "1")]
    assert "rank 1 succeeded" in done.stderr


def test_the_exit_code_is_the_culprit_s_whatever_its_last_line_says(job: Path, env: dict[str, str]) -> None:
    done = cli("run", f"{job}:complain_and_leave", "-n", "2", "--json", env=env)
    first, second = json.loads(done.stdout)
    assert (first["role"], second["role"]) == ("victim", "culprit")
    assert (first["exit_code"], second["exit_code"], done.returncode) == (9, 1, 1)


def test_json_is_all_that_is_on_stdout(job: Path, env: dict[str, str]) -> None:
    done = cli("run", f"{job}:main", "--replicas", "2", "-a", "steps=text", "--json", env=env)
    results = json.loads(done.stdout)
    assert [result["result"] for result in results] == [{"steps": "text"}] * 2
    assert done.stderr == ""


def test_a_module_of_the_current_directory(job: Path, env: dict[str, str]) -> None:
    done = cli_afresh("run", "my_job:main", env=env, prefix=["env", "-C", str(job.parent)])
    assert done.returncode == 0, done.stderr


def test_a_failure_has_its_own_code_and_its_last_lines(job: Path, env: dict[str, str]) -> None:
    done = cli("run", f"{job}:main", "-n", "2", "-a", "culprit=1", env=env)
    assert done.returncode == 7
    assert re.search(r"1 +failed +7 +exited with code 7", done.stdout)
    assert "1| step 1" in done.stderr
    assert "0| step 1" not in done.stderr


def test_the_same_on_a_control_plane(job: Path, env: dict[str, str]) -> None:
    here = {**env, "BASILICA_IDLE_EXIT": "60"}
    try:
        done = cli("run", f"{job}:main", "-n", "2", "--executor", "basilica", "--json", env=here)
        assert done.returncode == 0, done.stderr
        assert [result["result"] for result in json.loads(done.stdout)] == [{"steps": 1}] * 2
    finally:
        cli("local", "stop", "--state-dir", env["BASILICA_STATE_DIR"], env=here)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_and_says_what_is_left(
    job: Path, env: dict[str, str], tmp_path: Path, number: int
) -> None:
    command = Command(["run", f"{job}:hold", "-n", "2", "-a", f"place={tmp_path}"], env)
    running = pids(tmp_path, 2)
    command.signal(number)
    assert command.wait() == 130
    assert "cancelled; nothing is left of 2 replicas" in command.stderr
    assert [start_of(pid) for pid in running] == [None, None]


def test_a_second_interrupt_does_not_wait_for_replicas_that_refuse_to_end(
    job: Path, env: dict[str, str], tmp_path: Path
) -> None:
    options = ["-o", "grace_seconds=20", "-a", f"place={tmp_path}"]
    command = Command(["run", f"{job}:refuse_to_end", "-n", "2", *options], env)
    running = pids(tmp_path, 2)
    command.signal(signal.SIGINT)
    until(lambda: "cancelling" in command.stderr)
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    assert "may still run: local-" in command.stderr
    assert None not in [start_of(pid) for pid in running]  # it has not waited for their end
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def test_trouble_in_mid_run_names_what_may_still_run(env: dict[str, str], tmp_path: Path) -> None:
    with KubeServer(processes=False) as kube:
        kube.fail("watch", "pods", status=403)
        config = {"KUBECONFIG": str(kube.kubeconfig(tmp_path / "config"))}
        done = cli("run", "m:f", "-n", "2", "--executor", "eks", "-o", "image=i", env={**env, **config})
        (name,) = [job["metadata"]["name"] for job in kube.objects("jobs")]
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert f"eks: the test said so; may still run: {name} on eks, rank 0, 1" in told
    assert f"(kubectl delete job {name} --namespace default)" in told
    assert "most recent call last" not in done.stderr


def test_of_a_gang_that_was_stopped_only_the_culprits_lines_are_shown(env: dict[str, str], tmp_path: Path) -> None:
    with KubeServer() as kube:
        config = {"KUBECONFIG": str(kube.kubeconfig(tmp_path / "config"))}
        arguments = ["-a", "culprit=1", "-a", "code=7", "-a", f"directory={tmp_path}"]
        entrypoint = "basilica.testing.replicas:leave_or_wait"
        options = ["-n", "3", "--executor", "eks", "-o", "image=i"]
        done = cli("run", entrypoint, *options, *arguments, env={**env, **config})
    assert done.returncode == 7
    assert [line for line in done.stderr.splitlines() if "| " in line] == ["1| rank 1 leaves with 7"]
    assert done.stdout.count("stopped because rank 1 failed first") == 2


def test_a_long_result_is_whole_in_json_alone(job: Path, env: dict[str, str]) -> None:
    told = cli("run", f"{job}:write", "-a", "characters=5000", env=env).stdout
    assert "(5,002 characters; --json has them all)" in told
    assert told.count("x") == 1999
    whole = cli("run", f"{job}:write", "-a", "characters=5000", "--json", env=env).stdout
    assert json.loads(whole)[0]["result"] == "x" * 5000


def test_it_is_killed_and_leaves_nothing(job: Path, env: dict[str, str], tmp_path: Path) -> None:
    command = Command(["run", f"{job}:hold", "-n", "2", "-a", f"place={tmp_path}"], env)
    running = pids(tmp_path, 2)
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: [start_of(pid) for pid in running] == [None, None])


def test_a_live_table_in_a_terminal(job: Path, env: dict[str, str], tmp_path: Path) -> None:
    with at_terminal("run", f"{job}:hold", "-n", "3", "-a", f"place={tmp_path}", env=env) as terminal:
        terminal.read_until(r"3 running")
        terminal.read_until(r"2 +running")
        pids(tmp_path, 3)
        terminal.type(CTRL_C)
        terminal.read_until(r"cancelled; nothing is left of 3 replicas")
        assert terminal.wait() == 130


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["not a module:x"], 2, "is not of the form"),
        (["nowhere.py:main"], 2, "there is no file 'nowhere.py'"),
        (["m:f", "--arg", "steps"], 2, "'steps' is not of the form NAME=VALUE"),
        (["m:f", "--replicas", "0"], 2, "'--replicas' / '-n'"),
        (["m:f", "--timeout", "soon"], 2, "'soon' is no duration"),
        (["m:f", "--executor", "cloud"], 2, "'cloud' is not one of"),
        (["m:f", "--executor", "sagemaker"], 2, "missing a required argument: 'image'"),
        (["m:f", "-o", "colour=red"], 2, "unexpected keyword argument 'colour'"),
        (["m:f", "--executor", "sagemaker", "-o", "image=i", "-o", "role_arn=r", "-o", "output_path=o"], 1, "s3://"),
        (["no_such_module:f"], 1, "No module named 'no_such_module'"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], code: int, said: str, env: dict[str, str]) -> None:
    done = cli("run", *arguments, env={**env, "AWS_DEFAULT_REGION": "us-east-1"})
    assert done.returncode == code, done.stderr
    assert said in re.sub(r"[\s│]+", " ", done.stderr + done.stdout)
    assert "most recent call last" not in done.stderr or code == 1
