"""What writers that were killed leave half written on a shared disk: it is found and removed, a live writer's never."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from basilica.cli.main import app
from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce
from basilica.diloco.bucket import Bucket
from basilica.diloco.inspection import DRAFT_SECONDS, garbage
from basilica.diloco.stores.file import DRAFT, FileStore

WRITER = """
import os, sys, time
if "without unnamed files" in sys.argv:
    os.O_TMPFILE = os.O_DIRECTORY | os.O_EXCL  # as a file system that knows none: the flags are refused
from basilica.diloco.stores.file import FileStore
def buffers():
    yield memoryview(b"half of it")
    print("half", flush=True)
    time.sleep(600)
getattr(FileStore(sys.argv[1]), sys.argv[2])("run/states/fragment-0/00000001/00000-of-00001", 100, buffers())
"""


@pytest.fixture(params=["put", "put_if_absent"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has written half of an object."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), request.param, "without unnamed files"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.communicate()


def drafts(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.name.startswith(DRAFT))


def aged(path: Path, seconds: float = 2 * DRAFT_SECONDS) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_draft_is_nobodys_only_when_it_is_old_and_its_writer_dead(
    writer: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    bucket = Bucket(FileStore(str(tmp_path)))
    (draft,) = drafts(tmp_path)
    aged(draft)
    assert garbage(bucket).keys == (), "its writer lives"
    writer.send_signal(signal.SIGSTOP)
    assert garbage(bucket).keys == (), "its writer sleeps"
    writer.kill()
    writer.wait()
    os.utime(draft)
    assert garbage(bucket).keys == (), "it was written to just now, perhaps by a machine whose locks are not seen here"
    aged(draft)
    found = garbage(bucket)
    assert [tmp_path / key for key in found.keys] == [draft]
    assert found.size == len("half of it")


def test_gc_removes_drafts_and_says_so(writer: "subprocess.Popen[str]", tmp_path: Path) -> None:
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / ".nfs0001").write_text("not ours")
    (draft,) = drafts(tmp_path)
    writer.kill()
    writer.wait()
    aged(draft)
    aged(tmp_path / "run" / ".nfs0001")
    command = ["diloco", "gc", f"file://{tmp_path}", "--json"]
    told = json.loads(CliRunner().invoke(app, [*command, "--dry-run"]).stdout)
    assert told == {"objects": 1, "bytes": 10, "removed": False}
    assert drafts(tmp_path) == [draft]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert drafts(tmp_path) == []
    assert (tmp_path / "run" / ".nfs0001").exists()


def test_a_run_that_begins_removes_the_drafts_of_its_earlier_lives(
    writer: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    (draft,) = drafts(tmp_path)
    young = draft.with_name(f"{DRAFT}young")
    shutil.copyfile(draft, young)
    writer.kill()
    writer.wait()
    aged(draft)
    with (
        ObjectStoreAllReduce(f"file://{tmp_path}", 0, 1) as allreduce,
        ArrayDiLoCo([np.zeros(3, np.float32)], allreduce, sync_every=1) as diloco,
    ):
        diloco.step()
    assert drafts(tmp_path) == [young]


def test_a_file_system_without_locks_is_judged_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, how: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    store = FileStore(str(tmp_path))
    store.put("run/a", 1, iter([memoryview(b"x")]))
    old, young = (tmp_path / "run" / f"{DRAFT}{name}" for name in ("old", "young"))
    for draft in (old, young):
        draft.write_text("half")
    aged(old)
    assert [tmp_path / key for key in garbage(Bucket(store)).keys] == [old]
