"""What a rank does with `launcher="torchrun"`: real agents, one each, with one worker."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from basilica.shipping.source import ship
from tests.support.python_etcd import without_python_etcd
from tests.support.torchrun_ranks import Rank, meeting

pytestmark = pytest.mark.timeout(180)

ALONE = "torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --nnodes=1 --max-restarts=0"


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def fails(word: str) -> Any:
    def deeper() -> None:
        raise ValueError(word)

    deeper()


def test_the_traceback_of_a_function_that_fails_is_left_in_torchs_error_file(rank: Rank) -> None:
    code, _, complained = rank.run(ship(fails, args=("plain",)))
    assert code == 1
    assert rank.traceback() == complained
    assert rank.traceback().startswith("Traceback (most recent call last):\n")
    assert rank.traceback().endswith("ValueError: plain\n")
    assert json.loads(rank.error_file.read_text())["message"]["message"] == "ValueError: plain"


def test_so_is_that_of_a_worker_that_runs_a_function(rank: Rank) -> None:
    code, _, complained = rank.run(ship(fails, args=("worker",), launcher=ALONE))
    assert code == 1, complained
    assert rank.traceback().endswith("ValueError: worker\n")
    assert "<basilica>" not in rank.traceback()


SCRIPT = """
import helper, os, sys
from multiprocessing import get_context

class Thing:
    pass

def pickled(thing):
    print(type(thing).__module__, flush=True)

if __name__ == "__main__":
    print(__name__, sys.argv[1:], os.path.basename(__file__), os.environ["WORLD_SIZE"], flush=True)
    child = get_context("spawn").Process(target=pickled, args=(Thing(),))
    child.start()
    child.join()
    helper.act(sys.argv[1])
"""


def test_a_script_runs_as_if_it_had_been_started_itself_and_its_traceback_is_collected(rank: Rank) -> None:
    """It is not decorated with torch's `record`, imports its neighbour and spawns processes from itself."""
    (rank.directory / "app").mkdir()
    script = rank.directory / "app" / "train.py"
    script.write_text(SCRIPT)
    (rank.directory / "app" / "helper.py").write_text("def act(word):\n    if word == 'fail': raise KeyError(word)\n")
    code, said, complained = rank.run(ship(script, launcher=ALONE), "go", "--flag")
    assert code == 0, complained
    assert said.splitlines() == ["__main__ ['go', '--flag'] train.py 1", "__mp_main__"]
    assert not rank.error_file.exists()

    code, _, complained = rank.run(ship(script, launcher=ALONE), "fail")
    assert code == 1, complained
    assert rank.traceback().endswith("KeyError: 'fail'\n")
    assert f'File "{script}", line' in rank.traceback()
    assert "<basilica>" not in rank.traceback()


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_other_backends_meet_at_the_master_address(rank: Rank, backend: str) -> None:
    script = rank.directory / "train.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    code, said, complained = rank.run(ship(script, launcher="torchrun", rendezvous_backend=backend))
    assert (code, said) == (0, "0 1\n"), complained


def test_what_is_not_installed_is_said_in_one_sentence(rank: Rank) -> None:
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    rank.env.pop("PYTHONPATH", None)
    code, _, complained = rank.run(ship(fails, args=("x",), launcher="torchrun"), python=bare)
    assert code == 1
    assert complained.count("\n") == 1
    assert "needs torch, which" in complained
    assert "pip install torch" in complained
    assert "pip_packages=['torch']" in complained


def test_an_agent_needs_nothing_but_torch(rank: Rank) -> None:
    """Neither python-etcd nor basilica: what it speaks to its rendezvous with travels with the function."""
    rank.env |= without_python_etcd(rank.directory / "without") | {"PYTHONSAFEPATH": "1"}
    script = rank.directory / "train.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    with meeting(rank):
        rank.env |= {"BASILICA_WORLD_MIN": "1", "BASILICA_WORLD_MAX": "1"}
        for launcher in ("torchrun", "torchrun --rdzv-backend=etcd"):
            rank.env["BASILICA_RDZV_ID"] = launcher.replace(" ", "")
            code, said, complained = rank.run(ship(script, launcher=launcher))
            assert (code, said) == (0, "0 1\n"), complained


def test_an_agent_that_waits_for_others_ends_at_once_when_it_is_asked_to(rank: Rank) -> None:
    """torchrun alone would take the signal for a failed attempt, and go on waiting."""
    script = rank.directory / "train.py"
    script.write_text("import time; time.sleep(60)\n")
    with meeting(rank):
        process = rank.start(ship(script, launcher="torchrun"))
        try:
            assert process.stderr is not None
            while "Waiting for remaining peers" not in (line := process.stderr.readline()):
                assert line, "it ended"
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            process.communicate(timeout=30)
            assert process.returncode == -signal.SIGTERM
            assert time.monotonic() - began < 30
        finally:
            process.kill()
            process.communicate()
