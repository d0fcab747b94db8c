"""Snapshot files as `basilica.Progress` writes them, without it."""

import json
import time
from pathlib import Path

from basilica.progress.snapshot_file import HEADER_BYTES, MAGIC


def snapshot(step: int, rank: int, world: int, payload: bytes = b"payload") -> bytes:
    facts = {
        "step": step,
        "world": world,
        "rank": rank,
        "bytes": len(payload),
        "sealed_at": time.time(),
        "checksum": "",
    }
    return (MAGIC + json.dumps(facts).encode() + b"\n").ljust(HEADER_BYTES, b"\0") + payload


def write_snapshot(path: Path, step: int, rank: int, world: int, payload: bytes = b"payload") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(snapshot(step, rank, world, payload))


PROGRAM = f"""
import json, os, time
def write(path, step, rank, world, payload=b"payload"):
    facts = dict(step=step, world=world, rank=rank, bytes=len(payload), sealed_at=time.time(), checksum="")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(({MAGIC!r} + json.dumps(facts).encode() + b"\\n").ljust({HEADER_BYTES}, b"\\0") + payload)
memory, kept = os.environ["BASILICA_SNAPSHOT_DIR"], os.environ["BASILICA_CHECKPOINT_DIR"] + "/snapshots"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
"""The beginning of a rank's program that writes snapshots."""
