"""The directory of a run, as the entrypoint of a rank gets it in its pod: joined, compared, unpacked, or refused."""

import hashlib
import os
from pathlib import Path

import pytest

from basilica.rank.workdir import Undeliverable, deliver, without_delivery
from basilica.testing.runtime_contract import packed

CONTENT = packed({"hello": "from afar", "sub/in": "x"})


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Three parts, and a volume to unpack them in."""
    sent = tmp_path / "sent"
    sent.mkdir()
    size = len(CONTENT) // 3 + 1
    for number in range(3):
        (sent / f"{number:04d}").write_bytes(CONTENT[number * size : (number + 1) * size])
    return {
        "BASILICA_ARCHIVE": hashlib.sha256(CONTENT).hexdigest(),
        "BASILICA_ARCHIVE_PARTS": "3",
        "BASILICA_ARCHIVE_SENT": str(sent),
        "BASILICA_ARCHIVE_UNPACKED": str(tmp_path / "volume" / "code"),
        "BASILICA_ARCHIVE_WORKDIR": "",
        "RANK": "0",
    }


def test_parts_become_a_directory_once(environment: dict[str, str], tmp_path: Path) -> None:
    place = deliver(environment)
    assert place == tmp_path / "volume" / "code"
    assert (place / "hello").read_text() == "from afar"
    (place / "mark").touch()
    (tmp_path / "sent" / "0000").unlink()
    assert deliver(environment) == place
    assert (place / "mark").exists()
    assert deliver({**environment, "BASILICA_ARCHIVE_WORKDIR": "sub"}) == place / "sub"
    assert os.listdir(tmp_path / "volume") == ["code"]


def test_without_an_archive_there_is_nothing_to_do(environment: dict[str, str]) -> None:
    assert deliver({}) is None
    assert deliver({"BASILICA_ARCHIVE": "mine"}) is None
    assert without_delivery({"BASILICA_ARCHIVE": "mine"}) == {"BASILICA_ARCHIVE": "mine"}
    assert without_delivery(environment) == {"RANK": "0"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"BASILICA_ARCHIVE_PARTS": "0"}, r"is not on the cluster \(any more\): deploy the run again"),
        ({"BASILICA_ARCHIVE_PARTS": "4"}, "part 4 of 4 of the archive .* is missing: deploy the run again"),
        ({"BASILICA_ARCHIVE_PARTS": "2"}, "what came is not the archive"),
        ({"BASILICA_ARCHIVE": "0" * 64}, "what came is not the archive 000000000000 but"),
        ({"BASILICA_ARCHIVE_WORKDIR": "no/such"}, "there is no directory no/such in what was sent"),
        ({"BASILICA_ARCHIVE_UNPACKED": "/proc/no/such"}, "cannot unpack the archive .* into /proc/no/such"),
    ],
)
def test_what_is_wrong_is_said(environment: dict[str, str], change: dict[str, str], told: str) -> None:
    with pytest.raises(Undeliverable, match=told):
        deliver(environment | change)


def test_what_is_no_archive_is_not_half_unpacked(environment: dict[str, str], tmp_path: Path) -> None:
    half = CONTENT[: len(CONTENT) // 2]
    (tmp_path / "sent" / "0000").write_bytes(half)
    changed = {"BASILICA_ARCHIVE": hashlib.sha256(half).hexdigest(), "BASILICA_ARCHIVE_PARTS": "1"}
    with pytest.raises(Undeliverable, match="cannot be unpacked"):
        deliver(environment | changed)
    assert os.listdir(tmp_path / "volume") == []
