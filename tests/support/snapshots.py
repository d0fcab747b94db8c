"""Snapshot files as `basilica.Progress` writes them, without it: the header is right, the rest is not read."""

import time
from dataclasses import asdict
from pathlib import Path

from basilica.progress.snapshot_file import HEADER_BYTES, MAGIC, Header, encode_header


def header(step: int, rank: int, world: int, payload: bytes = b"payload") -> Header:
    return Header(
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


def snapshot(step: int, rank: int, world: int, payload: bytes = b"payload") -> bytes:
    return encode_header(header(step, rank, world, payload)) + payload


def write_snapshot(path: Path, step: int, rank: int, world: int, payload: bytes = b"payload") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(snapshot(step, rank, world, payload))


PROGRAM = f"""
import json, os, sys, zlib
from pathlib import Path
def write(path, step, rank, world):
    facts = dict({asdict(header(0, 0, 1))!r}, step=step, rank=rank, world=world)
    line = json.dumps(facts).encode()
    header = {MAGIC!r} + line + b"\\n%08x\\n" % zlib.crc32(line)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(header.ljust({HEADER_BYTES}, b"\\0") + b"payload")
memory, kept = os.environ["BASILICA_SNAPSHOT_DIR"], os.environ["BASILICA_CHECKPOINT_DIR"] + "/snapshots"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
"""The beginning of a rank's program that writes snapshots; any Python runs it, with or without `basilica`."""
