"""The directory of a run in the memory of this machine: whose it is, how long it stays, and what is kept of it."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from basilica.core.checkpoints import Checkpoint
from basilica.machine import files
from basilica.machine.layout import Layout
from basilica.runtimes.local.run_as import Access
from basilica.runtimes.local.snapshot_dirs import MEMORY, SnapshotDirs, is_memory, leftovers
from basilica.runtimes.local.snapshot_files import Interrupted, find_snapshots, persist
from tests.support.snapshots import snapshot, write_snapshot

in_memory = pytest.mark.skipif(not is_memory(MEMORY), reason="no memory file system here")
RUN = "train-0a1b2c3d"


@pytest.fixture
def dirs(tmp_path: Path) -> Iterator[SnapshotDirs]:
    layout = Layout(tmp_path / "state")
    layout.run(RUN).mkdir(parents=True)
    layout.checkpoints(RUN).mkdir()
    found = SnapshotDirs(layout=layout, mark=f"test{os.getpid()}", access=Access())
    yield found
    files.remove(found.home)


def tiers(dirs: SnapshotDirs) -> set[tuple[int, int, str]]:
    return {(each.step, each.rank, each.tier) for each in find_snapshots(dirs, RUN)}


# ---- the directory ---------------------------------------------------------------------------------------------------


@in_memory
def test_a_run_has_a_private_directory_in_memory_that_goes_with_it(dirs: SnapshotDirs) -> None:
    made = Path(dirs.make(RUN))
    assert (str(made), dirs.make(RUN), dirs.used(RUN)) == (dirs.in_memory(RUN),) * 3
    for place in (made, made.parent):
        assert (stat.S_IMODE(place.lstat().st_mode), place.lstat().st_uid) == (0o700, os.geteuid())
    (made / "0.0").write_bytes(b"x")
    assert dirs.held() == [RUN]
    dirs.remove(RUN)
    assert not made.parent.exists()


@in_memory
@pytest.mark.parametrize("trouble", ["link", "file", "open to all", "other owner", "other state directory"])
def test_a_directory_that_is_not_this_servers_alone_is_not_used(
    dirs: SnapshotDirs, tmp_path: Path, trouble: str
) -> None:
    home = Path(dirs.home)
    match trouble:
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            home.symlink_to(tmp_path / "elsewhere")
        case "file":
            home.write_text("")
        case "open to all":
            home.mkdir()
            home.chmod(0o777)
        case "other owner":
            if os.geteuid() != 0:
                pytest.skip("only root can give a directory away")
            home.mkdir(mode=0o700)
            os.chown(home, 65534, 65534)
        case _:
            home.mkdir(mode=0o700)
            (home / "state-dir").write_text("/another")
    assert dirs.make(RUN) == dirs.used(RUN) == str(dirs.layout.snapshots(RUN))
    assert stat.S_IMODE(dirs.layout.snapshots(RUN).stat().st_mode) == 0o700
    assert dirs.held() == []
    if trouble == "link":
        assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_memory_the_directory_is_on_disk(dirs: SnapshotDirs, tmp_path: Path) -> None:
    elsewhere = SnapshotDirs(layout=dirs.layout, mark="x", access=Access(), memory=str(tmp_path))
    assert elsewhere.make(RUN) == str(dirs.layout.snapshots(RUN))


@in_memory
def test_directories_of_runs_and_servers_that_are_gone_are_found(dirs: SnapshotDirs) -> None:
    dirs.make(RUN)
    dirs.make("gone-0a1b2c3d")
    dirs.remove_orphans()
    assert dirs.held() == [RUN]
    assert dirs.home not in dict(leftovers())
    files.remove(str(dirs.layout.root))
    assert dict(leftovers())[dirs.home] == str(dirs.layout.root)


# ---- what is in it ---------------------------------------------------------------------------------------------------


@in_memory
def test_snapshots_are_listed_by_their_headers_and_what_is_none_is_not(dirs: SnapshotDirs, tmp_path: Path) -> None:
    memory, kept = Path(dirs.make(RUN)), dirs.layout.checkpoints(RUN) / "snapshots"
    write_snapshot(memory / "0.0", 7, 0, 2)
    write_snapshot(memory / "1.1.peer", 7, 1, 2)
    write_snapshot(kept / "5" / "0", 5, 0, 2)
    write_snapshot(kept / "5" / "1", 4, 1, 2)  # not of the step that it is filed under
    (memory / "2.0").write_bytes(snapshot(7, 2, 3)[:4000])
    (memory / "3.0").write_bytes(b"\0" * 5000)
    write_snapshot(tmp_path / "secret", 9, 4, 5)
    (memory / "4.0").symlink_to(tmp_path / "secret")
    os.mkfifo(memory / "5.0")
    write_snapshot(memory / "notes.txt", 9, 0, 1)
    assert tiers(dirs) == {(7, 0, "memory"), (7, 1, "peer"), (5, 0, "disk")}


@in_memory
def test_an_ended_run_keeps_its_newest_complete_step_and_frees_the_memory(dirs: SnapshotDirs) -> None:
    memory, kept = Path(dirs.make(RUN)), dirs.layout.checkpoints(RUN) / "snapshots"
    for rank in (0, 1):
        write_snapshot(memory / f"{rank}.0", 10, rank, 2, b"x" * 100_000)
        write_snapshot(memory / f"{rank}.1", 9, rank, 2)
    write_snapshot(memory / "0.1", 11, 0, 2)
    write_snapshot(memory / "0.0.peer", 10, 0, 2)
    before = (memory / "1.0").read_bytes()
    persist(dirs, RUN, lambda: False)
    assert tiers(dirs) == {(10, 0, "disk"), (10, 1, "disk"), (11, 0, "disk")}
    assert (kept / "ended" / "1.0").read_bytes() == before
    assert not memory.exists()
    persist(dirs, RUN, lambda: False)
    assert len(tiers(dirs)) == 3


@in_memory
def test_a_peer_copy_is_kept_where_it_is_the_only_one(dirs: SnapshotDirs) -> None:
    memory = Path(dirs.make(RUN))
    write_snapshot(memory / "0.0.peer", 10, 0, 1)
    persist(dirs, RUN, lambda: False)
    assert tiers(dirs) == {(10, 0, "disk")}


@in_memory
def test_a_move_that_is_interrupted_loses_nothing_and_goes_on(dirs: SnapshotDirs) -> None:
    memory = Path(dirs.make(RUN))
    for rank in range(3):
        write_snapshot(memory / f"{rank}.0", 10, rank, 3)
    calls = iter((False, True))
    with pytest.raises(Interrupted):
        persist(dirs, RUN, lambda: next(calls))
    assert {(rank, step) for step, rank, _ in tiers(dirs)} == {(0, 10), (1, 10), (2, 10)}
    assert len({tier for _, _, tier in tiers(dirs)}) == 2
    persist(dirs, RUN, lambda: False)
    ended = dirs.layout.checkpoints(RUN) / "snapshots" / "ended"
    assert sorted(path.name for path in ended.iterdir()) == ["0.0", "1.0", "2.0"]


@in_memory
def test_a_kill_in_the_middle_of_a_move_loses_nothing(dirs: SnapshotDirs) -> None:
    memory = Path(dirs.make(RUN))
    for rank in range(3):
        write_snapshot(memory / f"{rank}.0", 10, rank, 3, bytes([rank]) * 3_000_000)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from basilica.machine.layout import Layout\n"
        "from basilica.runtimes.local import snapshot_files as it\n"
        "from basilica.runtimes.local.run_as import Access\n"
        "from basilica.runtimes.local.snapshot_dirs import SnapshotDirs\n"
        "it.COPY_BYTES = 1 << 20\n"
        "dirs = SnapshotDirs(layout=Layout(Path(sys.argv[1])), mark=sys.argv[2], access=Access())\n"
        "left = [6]\n"
        "def closing():\n    left[0] -= 1\n    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "it.persist(dirs, sys.argv[3], closing)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(dirs.layout.root), dirs.mark, RUN], check=False)
    assert done.returncode == -9
    assert {(rank, step) for step, rank, _ in tiers(dirs)} == {(0, 10), (1, 10), (2, 10)}
    persist(dirs, RUN, lambda: False)
    ended = dirs.layout.checkpoints(RUN) / "snapshots" / "ended"
    assert sorted(path.name for path in ended.iterdir()) == ["0.0", "1.0", "2.0"]
    assert (ended / "1.0").read_bytes()[4096:] == b"\x01" * 3_000_000


@in_memory
def test_a_checkpoint_directory_that_is_a_link_gets_nothing(dirs: SnapshotDirs, tmp_path: Path) -> None:
    memory = Path(dirs.make(RUN))
    write_snapshot(memory / "0.0", 10, 0, 1)
    (tmp_path / "elsewhere").mkdir()
    (dirs.layout.checkpoints(RUN) / "snapshots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="snapshots"):
        persist(dirs, RUN, lambda: False)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (memory / "0.0").exists()


def test_a_checkpoint_is_complete_with_all_ranks_of_its_world() -> None:
    some = Checkpoint(step=1, tier="disk", world=2, ranks=1, bytes=1, sealed_at=1.0)
    assert not some.complete
