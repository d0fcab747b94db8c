"""Archives that came from elsewhere: none gets out of its directory, whatever it holds."""

import errno
import gzip
import io
import os
import re
import stat
import tarfile
from pathlib import Path

import pytest

from basilica.core.errors import ValidationError
from basilica.shipping import unpack as archives
from basilica.shipping.unpack import Abandoned, BrokenArchive, check, unpack


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, to: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, to, mode
    return found


def packed(*entries: tarfile.TarInfo, content: bytes = b"words") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for each in entries:
            if each.isreg():
                each.size = len(content)
            archive.addfile(each, io.BytesIO(content) if each.isreg() else None)
    return file.getvalue()


HOSTILE = {
    "a path upwards": [entry("../out")],
    "a path upwards from within": [entry("a/../../out")],
    "a link to elsewhere": [entry("link", tarfile.SYMTYPE, to="/etc")],
    "a link upwards": [entry("link", tarfile.SYMTYPE, to="../..")],
    "a hard link upwards": [entry("link", tarfile.LNKTYPE, to="../../etc/passwd")],
    "a device": [entry("device", tarfile.CHRTYPE)],
    "a pipe": [entry("pipe", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_reaches_beyond_its_directory_is_refused(name: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(packed(*HOSTILE[name]))
    with pytest.raises(ValidationError):
        check(archive)
    with archive.open("rb") as file, pytest.raises(BrokenArchive):
        unpack(file, tmp_path / "box" / "target")
    assert os.listdir(tmp_path / "box") == []


def test_links_that_lead_out_together_are_found_when_they_are_unpacked(tmp_path: Path) -> None:
    steps = [entry("here", tarfile.SYMTYPE, to="."), entry("out", tarfile.SYMTYPE, to="here/.."), entry("out/file")]
    with pytest.raises(BrokenArchive):
        unpack(io.BytesIO(packed(*steps)), tmp_path / "box" / "target")
    assert not (tmp_path / "box" / "file").exists()


def test_what_is_harmless_comes_out_as_it_was_and_is_ours(tmp_path: Path) -> None:
    entries = [
        entry("src", tarfile.DIRTYPE, mode=0o500),
        entry("src/tool", mode=0o4777),
        entry("src/again", tarfile.SYMTYPE, to="tool"),
        entry("/absolute"),
    ]
    for each in entries:
        each.uid, each.uname = 4242, "somebody"
    archive = tmp_path / "archive"
    archive.write_bytes(packed(*entries))
    check(archive)
    with archive.open("rb") as file:
        unpack(file, tmp_path / "target")
    tool = tmp_path / "target" / "src" / "tool"
    assert (tool.read_bytes(), (tmp_path / "target" / "src" / "again").read_bytes()) == (b"words", b"words")
    assert stat.S_IMODE(tool.stat().st_mode) == 0o755
    assert tool.stat().st_uid == os.geteuid()
    assert (tmp_path / "target" / "absolute").exists()


def raw(*headers: tuple[bytes, bytes]) -> bytes:
    """An archive of headers that `tarfile` would not write."""
    return gzip.compress(
        b"".join(header + data + b"\0" * (-len(data) % 512) for header, data in headers) + b"\0" * 1024
    )


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    made = tarfile.TarInfo(name)
    made.type = kind
    block = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    if size < 0:
        block[124:136] = size.to_bytes(12, "big", signed=True)
    else:
        block[124:136] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


CANNOT_BE_UNPACKED = {
    "a long name": ([entry("n" * 5000)], "name of more than 255 bytes"),
    "a long path": ([entry("/".join(["d" * 200] * 20))], "path of 4019 bytes"),
    "many levels": ([entry("/".join("d" * 900))], "more than 128 levels deep"),
    "three thousand levels": ([entry("/".join("d" * 3000))], "path of 5999 bytes"),
    "a file and a directory": ([entry("a"), entry("a", tarfile.DIRTYPE)], "'a' is both a file and a directory"),
    "a directory and a file": ([entry("a", tarfile.DIRTYPE), entry("a")], "'a' is both a directory and a file"),
    "a file that has something below it": ([entry("a"), entry("a/b")], "'a/b' is below 'a', which is a file"),
    "a file in the place of a directory that was meant": ([entry("a/b"), entry("a")], "'a' is both a directory and"),
    "a link that has something below it": (
        [entry("a", tarfile.SYMTYPE, to="b"), entry("a/b")],
        "'a/b' is below 'a', which is a link",
    ),
    "a link to itself with something below it": (
        [entry("a", tarfile.SYMTYPE, to="a"), entry("a/b")],
        "'a/b' is below 'a', which is a link",
    ),
    "an empty name": ([entry("")], "has no name"),
    "a directory without a name": ([entry("", tarfile.DIRTYPE)], "has no name"),
    "a name of slashes": ([entry("///")], "has no name"),
    "a hard link to what is not there": ([entry("a", tarfile.LNKTYPE, to="b")], "hard link to 'b', which is no file"),
    "a hard link to a directory": (
        [entry("b", tarfile.DIRTYPE), entry("a", tarfile.LNKTYPE, to="b")],
        "hard link to 'b', which is no file",
    ),
    "a link to a long name": ([entry("a", tarfile.SYMTYPE, to="x" * 300)], "name of more than 255 bytes"),
}


@pytest.mark.parametrize("name", CANNOT_BE_UNPACKED)
def test_what_no_file_system_holds_is_refused_when_it_comes(name: str, tmp_path: Path) -> None:
    entries, problem = CANNOT_BE_UNPACKED[name]
    archive = tmp_path / "archive"
    archive.write_bytes(packed(*entries))
    with pytest.raises(ValidationError, match=re.escape(problem)):
        check(archive)
    with archive.open("rb") as file, pytest.raises(BrokenArchive, match=re.escape(problem)):
        unpack(file, tmp_path / "box" / "target")
    assert os.listdir(tmp_path / "box") == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (raw((header("a", -512), b"")), "'a' has -512 bytes"),
        (raw((header("a", -(1 << 60)), b"")), "'a' has -"),
        (raw((header("pax", 1 << 32, b"x"), b"")), "a header of"),
        (raw((header("long", 1 << 32, b"L"), b"")), "a header of"),
        (b"no gzip", "is no tar.gz"),
        (gzip.compress(b"no tar" * 1000), "is no tar.gz"),
        (packed(entry("a"))[:-20], "is no tar.gz"),
        (b"", "is no tar.gz"),
    ],
    ids=["negative", "very negative", "pax bomb", "name bomb", "no gzip", "no tar", "cut short", "empty"],
)
def test_what_is_no_archive_is_refused_when_it_comes(content: bytes, problem: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(content)
    with pytest.raises(ValidationError, match=problem):
        check(archive)
    with archive.open("rb") as file, pytest.raises(BrokenArchive):
        unpack(file, tmp_path / "box" / "target")
    assert os.listdir(tmp_path / "box") == []


def test_what_tar_makes_of_a_directory_is_taken(tmp_path: Path) -> None:
    """With an entry for the directory itself, names that begin with `./`, a file that comes twice, and hard links."""
    entries = [
        entry(".", tarfile.DIRTYPE, mode=0o755),
        entry("./src", tarfile.DIRTYPE, mode=0o755),
        entry("./src/a"),
        entry("./src/a"),
        entry("./src/b", tarfile.LNKTYPE, to="./src/a"),
        entry("./src/deep/below"),
        entry("./here", tarfile.SYMTYPE, to="src/deep"),
    ]
    archive = tmp_path / "archive"
    archive.write_bytes(packed(*entries))
    check(archive)
    with archive.open("rb") as file:
        unpack(file, tmp_path / "target")
    assert (tmp_path / "target" / "here" / "below").read_bytes() == b"words"
    assert (tmp_path / "target" / "src" / "a").samefile(tmp_path / "target" / "src" / "b")


def test_more_than_the_limits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(packed(*(entry(f"file-{n}") for n in range(5))))
    for limit, most in (("UNPACKED_BYTES_MAX", 24), ("ENTRIES_MAX", 4), ("NAMES_BYTES_MAX", 20)):
        with monkeypatch.context() as patched:
            patched.setattr(archives, limit, most)
            with pytest.raises(ValidationError, match="more than"):
                check(archive)
            with archive.open("rb") as file, pytest.raises(BrokenArchive, match="more than"):
                unpack(file, tmp_path / "box" / "target")
    assert os.listdir(tmp_path / "box") == []


def test_unpacking_ends_when_nobody_wants_it_any_more(tmp_path: Path) -> None:
    content = packed(entry("zeros"), content=bytes(32 << 20))
    asked = 0

    def abandoned() -> bool:
        nonlocal asked
        asked += 1
        return asked > 10

    with pytest.raises(Abandoned):
        unpack(io.BytesIO(content), tmp_path / "box" / "target", abandoned)
    assert asked == 11
    assert os.listdir(tmp_path / "box") == []


def test_a_disk_that_does_not_take_it_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tarfile.TarFile, "makefile", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(io.BytesIO(packed(entry("a"))), tmp_path / "box" / "target")
    assert os.listdir(tmp_path / "box") == []
