"""Ranks with `launcher="torchrun"`, as a runtime starts them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from basilica.shipping.source import Shipped
from tests.rendezvous.harness import free_port, service_process


class Rank:
    """A process with what the runtime gives a rank."""

    def __init__(self, directory: Path, number: int = 0) -> None:
        self.directory = directory
        self.error_file = directory / f"{number}.error"
        self.env = {
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "BASILICA_RANK": str(number),
            "BASILICA_WORLD_MIN": "1",
            "BASILICA_WORLD_MAX": "1",
            "BASILICA_GPUS_PER_POD": "1",
            "BASILICA_RDZV_ENDPOINT": "127.0.0.1:1",
            "BASILICA_RDZV_ID": "run",
            "BASILICA_RESULT_FILE": str(directory / f"{number}.json"),
            "TORCHELASTIC_ERROR_FILE": str(self.error_file),
        }

    def start(self, shipped: Shipped, *args: str, python: str = sys.executable) -> "subprocess.Popen[str]":
        command = [python, *shipped.argv[1:], *args]
        pipe = subprocess.PIPE
        env = self.env | shipped.env
        return subprocess.Popen(command, env=env, cwd=self.directory, stdout=pipe, stderr=pipe, text=True)

    def run(self, shipped: Shipped, *args: str, python: str = sys.executable) -> tuple[int, str, str]:
        process = self.start(shipped, *args, python=python)
        said, complained = process.communicate(timeout=120)
        return process.returncode, said, complained

    def traceback(self) -> str:
        found: str = json.loads(self.error_file.read_text())["message"]["extraInfo"]["py_callstack"]
        return found


@contextmanager
def meeting(rank: Rank) -> Iterator[None]:
    port = free_port()
    rank.env |= {"BASILICA_RDZV_ENDPOINT": f"127.0.0.1:{port}", "BASILICA_WORLD_MIN": "2", "BASILICA_WORLD_MAX": "2"}
    with service_process(rank.directory / "data", "--port", str(port)):
        yield
