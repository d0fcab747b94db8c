"""The notice file: what is written is what a rank reads, and whatever a rank makes of it is repaired."""

import json
import os
import stat
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.progress import formats, notice_file
from basilica.progress.formats import PublishedNotice, encode_notice, next_counters, parse_notice
from basilica.progress.notice_file import write_notice

NOTICE = PublishedNotice(number=3, kind="scale", until=1.7e9, target=4, step=1200, reason="someone asked for 4 ranks")
NOTICES = st.builds(
    PublishedNotice,
    number=st.integers(1, 2**53 - 1),
    kind=st.sampled_from(get_args(formats.Kind)),
    until=st.floats(0, 9e10),
    target=st.none() | st.integers(0, 10**6),
    step=st.none() | st.integers(-(2**53) + 1, 2**53 - 1),
    reason=st.text(max_size=500),
)


def content(path: Path) -> tuple[int, Any]:
    data = path.read_bytes()
    assert len(data) == 4096
    return int.from_bytes(data[:8], "little"), json.loads(data[8:].rstrip(b"\0"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notice"


def test_the_file_is_as_documented(path: Path) -> None:
    write_notice(str(path), None)
    assert content(path) == (0, None)  # nothing was ever published
    write_notice(str(path), NOTICE)
    told = {"number": 3, "kind": "scale", "until": 1.7e9, "target": 4, "step": 1200}
    assert content(path) == (2, {**told, "reason": "someone asked for 4 ranks"})
    write_notice(str(path), None)
    assert content(path) == (4, None)


def test_everybody_may_read_it_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_notice(str(path), NOTICE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_to_write_the_same_again_changes_nothing(path: Path) -> None:
    for notice in (NOTICE, None):
        write_notice(str(path), notice)
        os.utime(path, ns=(1, 1))
        before = path.read_bytes()
        write_notice(str(path), notice)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, 1)


def test_it_is_written_in_place(path: Path) -> None:
    write_notice(str(path), None)
    inode = path.stat().st_ino
    write_notice(str(path), NOTICE)
    assert path.stat().st_ino == inode


def test_the_counter_is_odd_as_long_as_the_content_is_not_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_notice(str(path), None)
    seen = []
    real = notice_file._write

    def watched(fd: int, data: bytes, offset: int) -> None:
        real(fd, data, offset)
        seen.append(content(path))

    monkeypatch.setattr(notice_file, "_write", watched)
    write_notice(str(path), NOTICE)
    assert [(counter, found is None) for counter, found in seen] == [(1, True), (1, False), (2, False)]


def test_a_write_that_was_broken_off_is_made_good(path: Path) -> None:
    write_notice(str(path), NOTICE)
    data = bytearray(path.read_bytes())
    data[0] = 3  # as if the writer had been killed in the middle, with the new content in place already
    path.write_bytes(data)
    write_notice(str(path), NOTICE)
    assert content(path)[0] == 4


@pytest.mark.parametrize("left", [b"", b"\1", b"junk" * 5000, b"\xff" * 4096, bytes(4095)])
def test_whatever_a_rank_wrote_into_it_is_overwritten(path: Path, left: bytes) -> None:
    path.write_bytes(left)
    write_notice(str(path), NOTICE)
    data = path.read_bytes()[:4096]
    assert parse_notice(data[8:]) == NOTICE
    assert data[0] % 2 == 0
    assert data[:8] != bytes(8)


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("as it was")
    path.symlink_to(tmp_path / "secret")
    write_notice(str(path), NOTICE)
    assert (tmp_path / "secret").read_text() == "as it was"
    assert not path.is_symlink()
    assert parse_notice(path.read_bytes()[8:]) == NOTICE


def test_other_kinds_of_files_are_put_aside(path: Path) -> None:
    path.mkdir()
    write_notice(str(path), NOTICE)
    assert parse_notice(path.read_bytes()[8:]) == NOTICE
    path.unlink()
    os.mkfifo(path)
    write_notice(str(path), NOTICE)
    assert parse_notice(path.read_bytes()[8:]) == NOTICE


@given(NOTICES)
def test_every_notice_is_read_as_it_was_written(notice: PublishedNotice) -> None:
    payload = encode_notice(notice)
    assert len(payload) == 4088
    assert parse_notice(payload) == notice


def test_a_reason_is_cut_and_always_fits() -> None:
    for letter in ("x", "\0", '"', "🙂", "\ud800"):
        found = parse_notice(encode_notice(PublishedNotice(number=1, kind="drain", until=1.0, reason=letter * 9999)))
        assert found is not None
        assert len(found.reason) == 500


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 0},
        {"number": 2**60},
        {"kind": ""},
        {"kind": "x" * 33},
        {"until": float("nan")},
        {"until": -1.0},
        {"step": 2**60},
        {"target": -1},
    ],
)
def test_what_no_rank_would_accept_is_not_published(path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a notice"):
        write_notice(str(path), PublishedNotice(**{"number": 1, "kind": "scale", "until": 1.0, **wrong}))
    assert not path.exists()


SOUND = '{"number":1,"kind":"scale","until":1,"target":null,"step":null,"reason":"x"}'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SOUND, ""),
        (SOUND, "null"),
        (SOUND, "[]"),
        (SOUND, "[" * 4000),
        (SOUND, "3"),
        (SOUND, "{}"),
        ('"number":1', '"number":true'),
        ('"number":1', '"number":"1"'),
        ('"kind":"scale"', '"kind":["scale"]'),
        ('"until":1', '"until":NaN'),
        ('"until":1', '"until":null'),
        ('"until":1', '"until":1e300'),
        ('"step":null', '"step":1.5'),
        ('"target":null', '"target":"4"'),
    ],
)
def test_what_no_writer_of_ours_wrote_is_no_notice(old: str, new: str) -> None:
    assert parse_notice(SOUND.encode()) is not None
    assert parse_notice(SOUND.replace(old, new).encode()) is None


@given(st.binary(max_size=100))
def test_garbage_is_no_notice(garbage: bytes) -> None:
    assert parse_notice(garbage) is None


@pytest.mark.parametrize(
    ("found", "during", "after"),
    [(0, 1, 2), (2, 3, 4), (3, 3, 4), (2**64 - 2, 2**64 - 1, 2), (2**64 - 1, 2**64 - 1, 2)],
)
def test_the_counter_is_odd_during_a_write_and_never_zero_after_it(found: int, during: int, after: int) -> None:
    expected = during.to_bytes(8, "little"), after.to_bytes(8, "little")
    assert next_counters(found.to_bytes(8, "little")) == expected
