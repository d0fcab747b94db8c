"""A rank's place for the tests of notices: this process as a rank of its own, or programs as ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from basilica.core import environment as env
from basilica.machine.layout import Key, Layout
from basilica.progress import notices
from basilica.progress.notice_file import PublishedNotice, write_notice
from basilica.reports import writer

RUN = "train-1"
AFTERWARDS = 4e9  # seconds since the epoch: no test takes that long


@dataclass(frozen=True)
class Place:
    """The files of a run, and the programs that were started as its ranks."""

    layout: Layout
    started: ExitStack

    def __post_init__(self) -> None:
        self.layout.run(RUN).mkdir(parents=True)

    @property
    def notice_file(self) -> str:
        return f"{self.layout.run(RUN)}/notice"

    def publish(self, number: int, step: int | None = None, kind: str = "scale", **more: object) -> PublishedNotice:
        facts = {"until": AFTERWARDS, "target": 4, "reason": "someone asked for 4 ranks", **more}
        notice = PublishedNotice(number=number, kind=kind, step=step, **facts)  # type: ignore[arg-type]
        write_notice(self.notice_file, notice)
        return notice

    def withdraw(self) -> None:
        write_notice(self.notice_file, None)

    def environment(self, rank: int = 0, attempt: int = 1, **more: str) -> dict[str, str]:
        key = Key(RUN, rank, attempt)
        return {
            env.NOTICE_FILE: self.notice_file,
            env.REPORT_FILE: self.layout.report(key),
            env.DEPLOYMENT: RUN,
            env.RANK: str(rank),
            env.ATTEMPT: str(attempt),
            **more,
        }

    def start(self, code: str, rank: int = 0, attempt: int = 1, **more: str) -> "subprocess.Popen[str]":
        """Start a program as a rank. What still runs of it after the test is killed, children too."""
        variables = {**os.environ, **self.environment(rank, attempt, **more)}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.enter_context(process)
        self.started.callback(_kill_group, process.pid)
        return process


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as started:
        yield Place(Layout(tmp_path), started)


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """This process as a rank that has neither reported nor listened yet."""
    for name in (env.REPORT_BELL, env.TORCH_LOCAL_RANK):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    _forget()
    yield place
    _forget()


def _forget() -> None:
    writer._here.reset()
    notices._here.reset()
    writer._warned.clear()
