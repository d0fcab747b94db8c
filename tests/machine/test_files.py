"""The door to files that somebody else can write: whatever is in their place, nobody blocks and nothing leaks."""

import errno
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from basilica.machine import files
from basilica.machine.files import UnusableFile

SECRET = b"nobody's business"
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "run").mkdir()
    return tmp_path.resolve() / "run"


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    """A call that waits for somebody is ended by the alarm, and fails."""

    def too_long(*_: object) -> None:
        raise TimeoutError("the door waited")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)  # the name of a socket is short
        listening.bind(path.name)


def _device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero


IMPOSTORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "is a FIFO"),
    "link to zero": (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link"),
    "link to a secret": (lambda path: path.symlink_to(path.parent.parent / "secret"), "is a symbolic link"),
    "dangling link": (lambda path: path.symlink_to("nothing"), "is a symbolic link"),
    "link to itself": (lambda path: path.symlink_to(path), "is a symbolic link"),
    "socket": (_socket, "is a socket"),
    "directory": (Path.mkdir, "is a directory"),
    "device": (_device, "is a character device"),
}


@pytest.fixture(params=IMPOSTORS)
def impostor(request: pytest.FixtureRequest, place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The path of something that is not a file, and what it is."""
    monkeypatch.chdir(place)
    make, problem = IMPOSTORS[request.param]
    if request.param == "device" and os.geteuid() != 0:
        pytest.skip("only root makes devices")
    make(place / "file")
    return str(place / "file"), problem


def test_what_is_no_regular_file_is_named_and_not_opened(impostor: tuple[str, str]) -> None:
    path, problem = impostor
    with pytest.raises(UnusableFile, match=problem) as caught:
        files.read(path, 100)
    assert str(caught.value).startswith(path)


def test_a_file_is_written_in_the_place_of_anything(impostor: tuple[str, str], place: Path) -> None:
    path, _ = impostor
    files.write(path, b"ours")
    assert files.read(path, 100) == b"ours"
    assert (place.parent / "secret").read_bytes() == SECRET


def test_a_file_is_appended_to_in_the_place_of_anything(impostor: tuple[str, str], place: Path) -> None:
    path, _ = impostor
    for piece in (b"one", b"two"):
        with files.appending(path) as fd:
            os.write(fd, piece)
    assert files.read(path, 100) == b"onetwo"
    assert (place.parent / "secret").read_bytes() == SECRET


def test_anything_is_removed(impostor: tuple[str, str], place: Path) -> None:
    path, _ = impostor
    assert files.exists(path)
    files.remove(path)
    assert not files.exists(path)
    assert (place.parent / "secret").read_bytes() == SECRET
    files.remove(path)


def test_a_directory_is_made_in_the_place_of_anything(impostor: tuple[str, str]) -> None:
    path, _ = impostor
    files.make_directory(path)
    assert files.names(path) == []


def test_a_directory_on_the_way_that_is_a_link_is_not_followed(place: Path) -> None:
    (place / "real").mkdir()
    (place / "real" / "file").write_bytes(b"here")
    (place / "link").symlink_to("real")
    for refused in (
        lambda: files.read(str(place / "link" / "file"), 10),
        lambda: files.names(str(place / "link")),
        lambda: files.write(str(place / "link" / "file"), b"there"),
        lambda: files.remove(str(place / "link" / "file")),
        lambda: files.make_directory(str(place / "link" / "new")),
    ):
        with pytest.raises(UnusableFile, match="link is a symbolic link, not a directory"):
            refused()
    assert files.read(str(place / "real" / "file"), 10) == b"here"


def test_a_file_on_the_way_is_named(place: Path) -> None:
    (place / "file").write_bytes(b"")
    with pytest.raises(UnusableFile, match="file is a regular file, not a directory"):
        files.read(str(place / "file" / "below"), 10)


def test_what_is_not_there_is_not_found(place: Path) -> None:
    for path in (place / "nothing", place / "nothing" / "below"):
        with pytest.raises(FileNotFoundError):
            files.read(str(path), 10)
    assert files.kind(str(place / "nothing")) is None


def test_no_more_than_the_bound_is_read(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x" * 100)
    assert files.read(str(path), 100) == b"x" * 100
    with pytest.raises(UnusableFile, match="has more than 99 bytes"):
        files.read(str(path), 99)
    os.truncate(path, 1 << 40)  # all hole
    with pytest.raises(UnusableFile, match="has more than 1000 bytes"):
        files.read(str(path), 1000)


def test_a_file_that_grows_while_it_is_read_ends(place: Path) -> None:
    path, done = place / "file", threading.Event()
    path.write_bytes(b"x")

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not done.is_set() and file.tell() < 64 << 20:
                file.write(b"x" * 65536)

    def read_again_and_again() -> None:
        while True:
            files.read(str(path), 4 << 20)

    growing = threading.Thread(target=grow)
    growing.start()
    try:
        with pytest.raises(UnusableFile, match="more than 4194304 bytes"):
            read_again_and_again()
    finally:
        done.set()
        growing.join()


def test_an_error_of_the_disk_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "file").write_bytes(b"x")

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(UnusableFile, match="file cannot be used: Input/output error") as caught:
        files.read(str(place / "file"), 10)
    assert caught.value.errno == errno.EIO
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.errno, again.filename) == (str(caught.value), errno.EIO, str(place / "file"))


def test_a_file_under_a_lease_is_not_waited_for(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x")
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    with path.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(UnusableFile, match="held by a lease"):
            files.read(str(path), 10)


def test_what_takes_the_place_of_a_file_just_before_it_is_opened_is_not_read(
    impostor: tuple[str, str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange is made where a race would make it: between the look at the file and its opening."""
    path, problem = impostor
    refused = {"is a symbolic link": "levels of symbolic links", "is a socket": "No such device or address"}
    os.rename(path, place / "waiting")
    (place / "file").write_bytes(b"harmless")
    real, exchanged = os.stat, False

    def looked(name: str, **options: Any) -> os.stat_result:
        nonlocal exchanged
        found = real(name, **options)
        if name == "file" and not exchanged:
            exchanged = True
            os.unlink(place / "file")
            os.rename(place / "waiting", place / "file")
        return found

    monkeypatch.setattr(os, "stat", looked)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnusableFile, match=refused.get(problem, problem)):
        files.read(path, 100)
    assert exchanged
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_a_hard_link_to_a_file_of_another_user_is_refused(place: Path) -> None:
    os.chown(place, 12345, 12345)
    os.link(place.parent / "secret", place / "file")
    with pytest.raises(UnusableFile, match="hard link to a file of another user"):
        files.read(str(place / "file"), 100)


def test_a_hard_link_to_a_file_of_the_same_user_is_a_file(place: Path) -> None:
    os.link(place.parent / "secret", place / "file")
    assert files.read(str(place / "file"), 100) == SECRET


def test_more_names_than_the_bound_are_not_listed(place: Path) -> None:
    for number in range(5):
        (place / str(number)).touch()
    assert sorted(files.names(str(place), 5)) == list("01234")
    with pytest.raises(UnusableFile, match="has more than 4 entries"):
        files.names(str(place), 4)


def test_a_tree_of_any_depth_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With links in it, and directories that nobody may enter."""
    tree = place / "tree"
    tree.mkdir()
    monkeypatch.chdir(tree)
    for _ in range(3000):
        os.mkdir("d" * 40)
        os.symlink(place.parent, "link")
        os.chdir("d" * 40)
    os.chdir(place)
    (tree / "closed").mkdir()
    (tree / "closed" / "file").touch()
    (tree / "closed").chmod(0)
    files.remove_tree(str(tree))
    assert files.names(str(place)) == []
    assert (place.parent / "secret").read_bytes() == SECRET


def test_a_closed_directory_in_a_tree_is_removed_without_privileges(place: Path) -> None:
    (place / "tree" / "closed" / "below").mkdir(parents=True)
    (place / "tree" / "closed" / "file").touch()
    (place / "tree" / "closed").chmod(0)
    code = "import sys; from basilica.machine import files; files.remove_tree(sys.argv[1])"
    subprocess.run([*WITHOUT_PRIVILEGES, sys.executable, "-c", code, str(place / "tree")], check=True)
    assert files.names(str(place)) == []


def test_a_write_that_fails_leaves_nothing_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "file").write_bytes(b"before")

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        files.write(str(place / "file"), b"after")
    assert files.names(str(place)) == ["file"]
    assert files.read(str(place / "file"), 10) == b"before"


def test_a_link_is_no_tree(place: Path) -> None:
    (place / "real").mkdir()
    (place / "real" / "file").touch()
    (place / "link").symlink_to("real")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        files.remove_tree(str(place / "link"))
    assert (place / "real" / "file").exists()


@pytest.mark.parametrize("path", ["relative", "/", "/a/..", "/a/", "/a/."])
def test_a_path_that_is_not_canonical_is_a_mistake(path: str) -> None:
    with pytest.raises(ValueError, match="not a canonical path"):
        files.read(path, 1)


def test_no_descriptor_is_left_open(impostor: tuple[str, str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(UnusableFile):
            files.read(impostor[0], 1)
    assert len(os.listdir("/proc/self/fd")) == before
