"""Snapshot files as `basilica.Progress` writes them, without it: the header is right, the rest is not read."""

import time
from pathlib import Path

from basilica.progress.snapshot_file import HEADER_BYTES, Header, encode_header


def snapshot(step: int, rank: int, world: int, payload: bytes = b"payload") -> bytes:
    header = Header(
        step=step,
        before=0,
        world=world,
        rank=rank,
        line="line",
        keeper=True,
        sharded=True,
        planned=False,
        layout="",
        bytes=len(payload),
        sealed_at=time.time(),
        algorithm="crc32",
        manifest=(HEADER_BYTES, 0),
        checksum="",
    )
    return encode_header(header) + payload


def write_snapshot(path: Path, step: int, rank: int, world: int, payload: bytes = b"payload") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(snapshot(step, rank, world, payload))


PROGRAM = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.snapshots import snapshot
def write(path, step, rank, world, payload=b"payload"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(snapshot(step, rank, world, payload))
memory, kept = os.environ["BASILICA_SNAPSHOT_DIR"], os.environ["BASILICA_CHECKPOINT_DIR"] + "/snapshots"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
"""The beginning of a rank's program that writes snapshots."""
