"""Files of snapshots: what was written is read, and whatever was damaged is refused and named."""

import random
from pathlib import Path

import numpy as np
import pytest

from basilica.progress.memory import MemorySlots
from basilica.progress.snapshot_file import HEADER_BYTES, Corrupt, Snapshot, header_of, read_header
from basilica.progress.state import load
from tests.progress.snapshots import a_snapshot, header, save


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    snapshot = Snapshot(str(a_snapshot(tmp_path, step=7)))
    content = load(snapshot.manifest.skeleton, lambda name: np.frombuffer(snapshot.read(name)).copy())
    assert snapshot.header.step == 7
    assert content["parts"]["note"] == "kept"
    assert (content["parts"]["model"]["weight"] == np.arange(100_000.0)).all()
    assert (content["parts"]["model"]["bias"] == np.ones(3)).all()


@pytest.mark.parametrize("seed", range(200))
def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path, seed: int) -> None:
    path = a_snapshot(tmp_path)
    found = header_of(str(path))
    assert found is not None
    rng = random.Random(seed)
    data = bytearray(path.read_bytes())
    used = [
        range(len(data[:HEADER_BYTES].rstrip(b"\0"))),
        range(HEADER_BYTES, HEADER_BYTES + 800_000),
        range(*_span(found.manifest)),
    ]
    at = rng.choice(used[seed % 3])
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=str(path)):
        Snapshot(str(path)).check()


def _span(manifest: tuple[int, int]) -> tuple[int, int]:
    return manifest[0], manifest[0] + manifest[1]


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, 500_000])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    path = a_snapshot(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Corrupt):
        Snapshot(str(path)).check()


def test_a_write_that_was_interrupted_is_no_snapshot(tmp_path: Path) -> None:
    path = a_snapshot(tmp_path)
    slots = MemorySlots(str(tmp_path), 0)
    slot = slots.newest
    assert slot is not None
    slot.open(1000)  # and the process is killed
    assert header_of(str(path)) is None
    slots.close()


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    path = a_snapshot(tmp_path, step=12, rank=3)
    snapshot = Snapshot(str(path))
    at = snapshot.entries["model/bias"].at
    snapshot.close()
    assert at is not None
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="model/bias of step 12 of rank 3 does not match its checksum"):
        Snapshot(str(path)).check()


@pytest.mark.parametrize("data", [b"", b"BASILICA-SNAPSHOT-1\n", b"BASILICA-SNAPSHOT-1\n{}\n00000000\n", b"x" * 9000])
def test_other_files_have_no_header(data: bytes) -> None:
    assert read_header(data) is None


def test_the_slot_that_the_gang_goes_back_to_is_never_overwritten(tmp_path: Path) -> None:
    slots = MemorySlots(str(tmp_path), 0)
    kept = save(slots, {"x": 1}, step=1)
    slots.keep(1, "a")
    for step in range(2, 6):
        assert save(slots, {"x": step}, step=step) is not kept
    found = header_of(kept.path)
    assert found is not None
    assert found.step == 1
    slots.close()


def test_a_snapshot_that_is_being_copied_is_waited_for(tmp_path: Path) -> None:
    slots = MemorySlots(str(tmp_path), 0)
    save(slots, {"x": 1}, step=1)
    reading = slots.read_newest()
    assert reading is not None
    save(slots, {"x": 2}, step=2)
    slots.keep(2, "a")
    before = slots.is_free
    reading.done()
    assert [before, slots.is_free] == [False, True]
    slots.close()


def test_a_growing_state_fits_into_a_slot(tmp_path: Path) -> None:
    slots = MemorySlots(str(tmp_path), 0)
    for size in (10, 3_000_000, 20):
        path = save(slots, {"x": np.zeros(size)}, step=size).path
        Snapshot(path).check()
    slots.close()


def test_headers_are_equal_after_a_round_trip(tmp_path: Path) -> None:
    found = header_of(str(a_snapshot(tmp_path, step=3, world=4, rank=2, line="b", keeper=False, sharded=True)))
    assert found is not None
    assert found == header(
        step=3,
        world=4,
        rank=2,
        line="b",
        keeper=False,
        sharded=True,
        bytes=found.bytes,
        manifest=found.manifest,
        checksum=found.checksum,
    )
