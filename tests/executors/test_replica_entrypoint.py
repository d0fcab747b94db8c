"""What a replica executes, as a process of its own: its environment in; result, exit code and traceback out."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from basilica.executors.results import read_results
from basilica.testing.executor_contract import SECONDS, until

MODULE = """
    import os, sys, time
    from pathlib import Path
    from basilica.diloco import on_sigterm

    def tell(**arguments):
        return {"arguments": arguments, "rank": os.environ["REPLICA_RANK"]}

    def plain():
        return 1

    async def later(x):
        return x + 1

    def raise_error():
        raise ValueError("the loss is not a number")

    def leave(code):
        sys.exit(code)

    def hold(place, hook=None):
        if hook is not None:
            def save():
                Path(place, "saved").touch()
                return hook == "finish"
            on_sigterm(save)
        Path(place, "started").touch()
        try:
            while not (hook == "finish" and Path(place, "saved").exists()):
                time.sleep(0.01)
        finally:
            Path(place, "left").touch()
        return "done"

    def thing():
        return object()

    def large():
        return "x" * (9 << 20)

    number = 7

    class Trainer:
        @staticmethod
        def train():
            return "trained"

    if __name__ == "__main__":
        print("ran as a program", sys.argv[0])
"""


class Replica:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.result_file = directory / "results" / "3.json"
        (directory / "job.py").write_text(textwrap.dedent(MODULE))

    def start(self, entrypoint: str | None, arguments: Any = None, **variables: str) -> "subprocess.Popen[str]":
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(self.directory), *filter(None, sys.path)]),
            "REPLICA_RANK": "3",
            "WORLD_SIZE": "4",
            "BASILICA_RESULT_FILE": str(self.result_file),
            **({} if entrypoint is None else {"ENTRYPOINT": entrypoint}),
            **({} if arguments is None else {"ENTRYPOINT_ARGS": json.dumps(arguments)}),
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "basilica.diloco.replica_entrypoint"],
            env={name: value for name, value in env.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, entrypoint: str | None, arguments: Any = None, **variables: str) -> tuple[int, str]:
        """Its exit code and what it wrote."""
        process = self.start(entrypoint, arguments, **variables)
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out + err

    @property
    def result(self) -> Any:
        return json.loads(self.result_file.read_text())


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path)


def test_a_function_is_called_and_its_result_stored(replica: Replica) -> None:
    assert replica.run("job:tell", {"steps": 3, "layers": [1, 2]}) == (0, "")
    assert replica.result == {"arguments": {"steps": 3, "layers": [1, 2]}, "rank": "3"}


def test_other_things_that_can_be_called(replica: Replica) -> None:
    assert replica.run("job:later", {"x": 1}) == (0, "")
    assert replica.result == 2
    assert replica.run("job:Trainer.train") == (0, "")
    assert replica.result == "trained"


def test_a_module_is_run_as_a_program(replica: Replica) -> None:
    code, said = replica.run("job")
    assert (code, said) == (0, f"ran as a program {replica.directory}/job.py\n")
    assert replica.result is None


def test_arguments_in_pieces(replica: Replica) -> None:
    text = json.dumps({"steps": 3, "name": "x" * 40})
    pieces = {f"ENTRYPOINT_ARGS_{n}": text[start : start + 16] for n, start in enumerate(range(0, len(text), 16))}
    assert replica.run("job:tell", **pieces) == (0, "")
    assert replica.result["arguments"] == {"steps": 3, "name": "x" * 40}


@pytest.mark.parametrize("variable", ["BASILICA_RANK", "RANK"])
def test_the_rank_by_another_name(replica: Replica, variable: str) -> None:
    assert replica.run("job:tell", REPLICA_RANK="", **{variable: "2"}) == (0, "")
    assert replica.result["rank"] == "2"


def test_the_rendezvous_is_passed_only_to_who_asks_for_it(replica: Replica) -> None:
    uri = {"rendezvous_uri": "memory:///"}
    assert replica.run("job:plain", uri) == (0, "")
    assert replica.run("job:tell", uri) == (0, "")
    assert replica.result["arguments"] == uri


@pytest.mark.parametrize(
    ("entrypoint", "variables", "said"),
    [
        (None, {}, "ENTRYPOINT is not set"),
        ("job:plain", {"REPLICA_RANK": "first"}, "REPLICA_RANK is 'first'; it must be a number"),
        ("job:plain", {"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ("job:plain", {"ENTRYPOINT_ARGS": "{"}, "ENTRYPOINT_ARGS is no JSON"),
        ("job:plain", {"ENTRYPOINT_ARGS": "[1]"}, "no JSON object"),
    ],
)
def test_an_environment_that_is_wrong(
    replica: Replica, entrypoint: str | None, variables: dict[str, str], said: str
) -> None:
    code, text = replica.run(entrypoint, **variables)
    assert code == 2
    assert said in text
    assert "Traceback" not in text


def test_an_exception_is_told_everywhere(replica: Replica, tmp_path: Path) -> None:
    error_file, failure = tmp_path / "error.json", tmp_path / "output" / "failure"
    places = {"TORCHELASTIC_ERROR_FILE": str(error_file), "REPLICA_FAILURE_FILE": str(failure)}
    code, text = replica.run("job:raise_error", **places)
    assert code == 1
    assert text.rstrip().endswith("ValueError: the loss is not a number")
    assert "replica_entrypoint.py" not in text  # only the user's own frames
    told = json.loads(error_file.read_text())["message"]
    assert told["message"] == "ValueError: the loss is not a number"
    assert told["extraInfo"]["py_callstack"] == text
    assert int(told["extraInfo"]["timestamp"]) > 1_600_000_000
    assert failure.read_text() == "ValueError: the loss is not a number\n"
    assert not replica.result_file.exists()


def test_a_place_that_cannot_be_written_does_not_hide_the_error(replica: Replica) -> None:
    code, text = replica.run("job:raise_error", REPLICA_FAILURE_FILE="/proc/nowhere/failure")
    assert code == 1
    assert "ValueError: the loss is not a number" in text
    assert "could not store why" in text


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("job:nothing", "there is no 'nothing' in it"),
        ("job:number", "is of type int and cannot be called"),
        ("no_such_module:main", "No module named 'no_such_module'"),
        ("job:thing", "is of type object, which is no JSON"),
        ("job:large", "bytes of JSON, more than"),
    ],
)
def test_what_cannot_be_done_is_said(replica: Replica, entrypoint: str, said: str) -> None:
    code, text = replica.run(entrypoint)
    assert code == 1
    assert said in text
    assert not replica.result_file.exists()


@pytest.mark.parametrize(("given", "code"), [(0, 0), (None, 0), (3, 3), ("no data", 1)])
def test_its_own_exit_code(replica: Replica, given: Any, code: int) -> None:
    found, text = replica.run("job:leave", {"code": given})
    assert found == code
    assert text == ("no data\n" if given == "no data" else "")


@pytest.mark.parametrize("hook", [None, "save"])
def test_sigterm_leads_to_a_checkpoint_and_143(replica: Replica, tmp_path: Path, hook: str | None) -> None:
    process = replica.start("job:hold", {"place": str(tmp_path), "hook": hook})
    until((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert "Traceback" not in err
    assert (tmp_path / "left").exists()  # what the function cleans up is cleaned up
    assert (tmp_path / "saved").exists() is (hook is not None)


def test_a_hook_may_let_the_function_finish(replica: Replica, tmp_path: Path) -> None:
    process = replica.start("job:hold", {"place": str(tmp_path), "hook": "finish"})
    until((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert replica.result == "done"


def test_results_through_a_directory_that_all_see(replica: Replica, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/meet%20here"
    somewhere = {"BASILICA_RESULT_FILE": "", "REPLICA_JOB": "gang-1"}
    assert replica.run("job:plain", {"rendezvous_uri": uri}, **somewhere) == (0, "")
    assert replica.run("job:raise_error", {"rendezvous_uri": uri}, **somewhere, REPLICA_RANK="1")[0] == 1
    found = read_results(uri, "gang-1", range(4))
    assert found[3] == {"job": "gang-1", "rank": 3, "exit_code": 0, "result": 1}
    assert found[1]["error"] == "ValueError: the loss is not a number"
    assert set(found) == {1, 3}
    assert read_results(uri, "gang-2", range(4)) == {}  # what another gang left there is not ours
