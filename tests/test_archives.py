"""Archives that came from elsewhere: none gets out of its directory, whatever it holds."""

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from basilica.archives import BrokenArchive, check, unpack
from basilica.core.errors import ValidationError


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
