"""The header of a snapshot file: the first 4096 bytes, a magic line and one line of JSON, padded with NULs."""

import json
from dataclasses import dataclass

MAGIC = b"BASILICA-SNAPSHOT-1\n"
HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a snapshot is of. `sealed_at`: seconds since 1970, by the wall clock of the rank that wrote it."""

    step: int
    world: int
    rank: int
    bytes: int
    sealed_at: float


def read_header(data: bytes) -> Header | None:
    """Parse the first bytes of a file; None if it is no sealed snapshot."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None
    try:
        facts = json.loads(data[len(MAGIC) : HEADER_BYTES].rstrip(b"\0"))
        numbers = {name: facts[name] for name in ("step", "world", "rank", "bytes")}
        sealed_at = float(facts["sealed_at"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    whole = all(type(number) is int and 0 <= number < 1 << 63 for number in numbers.values())
    if not whole or not numbers["rank"] < numbers["world"] or not 0 < sealed_at < 1e11:
        return None
    return Header(**numbers, sealed_at=sealed_at)
