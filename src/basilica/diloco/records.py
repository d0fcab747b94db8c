"""Sealed records: small JSON texts that prove themselves. Every object of a round ends with one.

An object is its payload (perhaps none), the text, and a footer of fixed size with the text's length and checksum. A
record stands at the end so that an object can be written in one pass: the checksums of its payload are known by then. A
torn object has no valid record. The record's checksum is its *id*: what refers to it by id cannot mean other bytes.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

MAGIC = b"BSLround"
FOOTER = struct.Struct("<8sI16s")
TAIL = 4096
"""How much of an object's end is read in the hope to have the whole record."""


class Torn(Exception):
    """This is not a whole record."""


class Gone(Torn):
    """There is no such object; a listing that showed it was old."""


@dataclass(frozen=True, slots=True)
class Record:
    """`size`: bytes from the beginning of the text to the end of the object."""

    fields: Mapping[str, Any]
    id: str
    size: int


def digest(data: memoryview | bytes) -> str:
    """The checksum of a chunk."""
    return xxhash.xxh3_64_hexdigest(data)


def seal(fields: Mapping[str, Any]) -> tuple[bytes, str]:
    """The bytes of a record and its id: the same for the same fields, wherever it is made."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    checksum = xxhash.xxh3_128_digest(text)
    return text + FOOTER.pack(MAGIC, len(text), checksum), checksum.hex()


def missing_bytes(tail: memoryview) -> int:
    """How many bytes before `tail` belong to the record too; 0 if it is all there. `Torn` if there is no footer."""
    if len(tail) < FOOTER.size:
        raise Torn(f"is only {len(tail)} bytes long")
    magic, length, _ = FOOTER.unpack(tail[-FOOTER.size :])
    if magic != MAGIC:
        raise Torn("has no valid end")
    return max(0, int(length) + FOOTER.size - len(tail))


def unseal(tail: memoryview) -> Record:
    """The record at the end of `tail`, or `Torn`."""
    if missing_bytes(tail):
        raise Torn("is cut off at its beginning")
    _, length, checksum = FOOTER.unpack(tail[-FOOTER.size :])
    size = length + FOOTER.size
    text = bytes(tail[len(tail) - size : len(tail) - FOOTER.size])
    if xxhash.xxh3_128_digest(text) != checksum:
        raise Torn("does not fit its checksum")
    fields = json.loads(text)
    return Record(fields, checksum.hex(), size)
