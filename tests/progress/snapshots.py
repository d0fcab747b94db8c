"""Snapshots made by hand, for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from basilica.progress.memory import MemorySlots
from basilica.progress.snapshot_file import BEST, Header, Slot
from basilica.progress.state import take


def header(**given: Any) -> Header:
    usual: dict[str, Any] = {
        "step": 1,
        "before": 0,
        "world": 1,
        "rank": 0,
        "line": "a",
        "keeper": True,
        "sharded": False,
        "planned": False,
        "layout": "",
        "bytes": 0,
        "sealed_at": 1.0,
        "algorithm": BEST,
        "manifest": (0, 0),
        "checksum": "",
    }
    return Header(**(usual | given))


def save(slots: MemorySlots, parts: Mapping[str, Any], **given: Any) -> Slot:
    """Take a snapshot of the parts."""
    state = take(parts, {})
    return slots.write(
        state,
        header=lambda size, manifest, checksum: header(**given, bytes=size, manifest=manifest, checksum=checksum),
        keeper=given.get("keeper", True),
    )


def a_snapshot(directory: Path, **given: Any) -> Path:
    """Return the file of a sealed snapshot with two arrays."""
    slots = MemorySlots(str(directory), given.get("rank", 0))
    path = save(slots, {"model": {"weight": np.arange(100_000.0), "bias": np.ones(3)}, "note": "kept"}, **given).path
    slots.close()
    return Path(path)
