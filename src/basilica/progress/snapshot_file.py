"""The file of a snapshot: the state of one rank at one step, sealed, and checked when it is read.

    4096 bytes    header: a magic line, a line of JSON, and the CRC of that line
    payload       the arrays, each at a multiple of 64 bytes
    manifest      JSON: where each array is, and its checksum; then the pickled rest of the state

A header is erased before anything else of its file is overwritten, and written when all else is there: a process that
is killed in between leaves a file without a header, which is no snapshot. Every array has a checksum of its own, the
manifest has one in the header, and the header has one in itself, so a flipped bit anywhere is found and named.

The checksum of an array is taken piece by piece while it is copied, when the piece is still in the processor's cache:
this costs a tenth of the copy, where a second pass over the memory would double it.
"""

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from mmap import ACCESS_READ, mmap
from typing import Any

MAGIC = b"BASILICA-SNAPSHOT-1\n"
HEADER_BYTES = 4096
ALIGNMENT = 64
PIECE_BYTES = 512 << 10  # fits into the cache of a core, together with its copy
MANIFEST_BYTES_MAX = 1 << 30
TIME_MAX = 1e11
SPARE_BYTES = 1 << 20  # behind the arrays, for a manifest


class Corrupt(Exception):
    """A snapshot that cannot be trusted; the text names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The identity of a snapshot.

    `line`: the start of the gang that took it: ranks restore files of one line only, since the same step may have been
    taken twice. `before`: the step of the snapshot before it. `keeper`: the file has the arrays that all ranks share.
    `sharded`: the rank has arrays that no other rank has, so that every rank's file is needed. `planned`: it was taken
    for a planned change.
    """

    step: int
    before: int
    world: int
    rank: int
    line: str
    keeper: bool
    sharded: bool
    planned: bool
    layout: str
    bytes: int
    sealed_at: float
    algorithm: str
    manifest: tuple[int, int]
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array in a snapshot: the part of a larger one that begins at `offsets`, unless that is the whole of it.

    `at` is None for an array that another rank of the host keeps.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    at: int | None = None
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    entries: tuple[Entry, ...]
    skeleton: bytes


# ---- checksums -------------------------------------------------------------------------------------------------------


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _checksums() -> dict[str, Callable[[], Any]]:
    known: dict[str, Callable[[], Any]] = {"crc32": _Crc32}
    try:
        import xxhash  # noqa: PLC0415 (optional: four times as fast)

        known["xxh3"] = xxhash.xxh3_64
    except ImportError:
        pass
    return known


CHECKSUMS = _checksums()
BEST = "xxh3" if "xxh3" in CHECKSUMS else "crc32"


def checksum_of(data: Any, algorithm: str = BEST) -> str:
    taken = CHECKSUMS[algorithm]()
    taken.update(data)
    return str(taken.hexdigest())


# ---- the header ------------------------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    line = json.dumps(asdict(header), separators=(",", ":")).encode()
    encoded = MAGIC + line + b"\n" + f"{zlib.crc32(line):08x}\n".encode()
    if len(encoded) > HEADER_BYTES:
        raise ValueError("the header of a snapshot is too long")
    return encoded.ljust(HEADER_BYTES, b"\0")


def read_header(data: bytes) -> Header | None:
    """Parse the first bytes of a file; None if it is no sealed snapshot, or its header is damaged."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None
    try:
        line, crc, _ = data[len(MAGIC) : HEADER_BYTES].split(b"\n", 2)
        if f"{zlib.crc32(line):08x}".encode() != crc:
            return None
        found = json.loads(line)
        at, size = found.pop("manifest")
        header = Header(**found, manifest=(at, size))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return header if _is_plausible(header) else None


def _is_plausible(header: Header) -> bool:
    """Return whether the fields have their types: ranks write these files, and the server reads them."""
    counts = (header.step, header.world, header.rank, header.bytes, *header.manifest)
    return (
        all(type(count) is int and 0 <= count < 1 << 63 for count in counts)
        and type(header.before) is int
        and type(header.sealed_at) in (int, float)
        and 0 < header.sealed_at < TIME_MAX
        and all(type(flag) is bool for flag in (header.keeper, header.sharded, header.planned))
        and all(type(text) is str for text in (header.line, header.layout, header.algorithm, header.checksum))
    )


def header_of(path: str) -> Header | None:
    """Read the header of the file; None if there is no file, or no sealed snapshot in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return read_header(os.pread(fd, HEADER_BYTES, 0))
    except OSError:
        return None
    finally:
        os.close(fd)


# ---- writing ---------------------------------------------------------------------------------------------------------


class Slot:
    """A file that is overwritten by one snapshot after the other, mapped for as long as the process lives."""

    def __init__(self, path: str) -> None:
        self.path = path
        found = header_of(path)
        self.step: int | None = None if found is None else found.step  # of the sealed snapshot in it
        self.line: str | None = None if found is None else found.line
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._map: mmap | None = None
        self._view: memoryview | None = None

    def open(self, size: int) -> memoryview:
        """Erase the header and return the memory of the file, which has at least that size."""
        os.pwrite(self._fd, bytes(HEADER_BYTES), 0)
        self.step = self.line = None
        return self.grow(size)

    def grow(self, size: int) -> memoryview:
        """Return the memory of the file, which has at least that size; views of the memory before are void."""
        if self._map is None or len(self._map) < size:
            self._release()
            room = max(size + SPARE_BYTES, os.fstat(self._fd).st_size)
            os.posix_fallocate(self._fd, 0, room)  # else a full memory is a SIGBUS in the middle of the copy
            self._map = mmap(self._fd, room)
            self._view = memoryview(self._map)
        assert self._view is not None
        return self._view

    def seal(self, header: Header) -> None:
        os.pwrite(self._fd, encode_header(header), 0)
        self.step, self.line = header.step, header.line

    def close(self) -> None:
        self._release()
        os.close(self._fd)

    def _release(self) -> None:
        if self._view is not None:
            self._view.release()
        if self._map is not None:
            self._map.close()
        self._view = self._map = None


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def encode_manifest(entries: Sequence[Entry], skeleton: bytes) -> bytes:
    listed = json.dumps([asdict(entry) for entry in entries], separators=(",", ":")).encode()
    return len(listed).to_bytes(8, "little") + listed + skeleton


def now() -> float:
    return round(time.time(), 3)


# ---- reading ---------------------------------------------------------------------------------------------------------


class Snapshot:
    """A sealed snapshot, mapped for reading. Nothing of it is returned before its checksum is right."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap(file.fileno(), 0, access=ACCESS_READ)
        except (OSError, ValueError) as error:
            raise Corrupt(f"{path} cannot be read: {error}") from None
        self._view = memoryview(self._map)
        header = read_header(bytes(self._view[:HEADER_BYTES]))
        if header is None:
            self.close()
            raise Corrupt(f"{path} has no valid header")
        self.header = header
        try:
            self.manifest = self._read_manifest(header)
        except Corrupt:
            self.close()
            raise
        self.entries = {entry.name: entry for entry in self.manifest.entries}

    def _read_manifest(self, header: Header) -> Manifest:
        at, size = header.manifest
        if header.algorithm not in CHECKSUMS:
            raise Corrupt(f"{self.path} has checksums of kind {header.algorithm}: install xxhash")
        if not HEADER_BYTES <= at <= at + size <= len(self._map) or size > MANIFEST_BYTES_MAX:
            raise Corrupt(f"{self.path} is cut off")
        data = bytes(self._view[at : at + size])
        if checksum_of(data, header.algorithm) != header.checksum:
            raise Corrupt(f"{self.path}: the manifest of step {header.step} of rank {header.rank} is damaged")
        length = int.from_bytes(data[:8], "little")
        return Manifest(tuple(_entries(json.loads(data[8 : 8 + length]))), data[8 + length :])

    def read(self, name: str) -> memoryview:
        """Return the bytes of an array, checked; they are valid until `close`."""
        entry = self.entries[name]
        assert entry.at is not None
        data = self._view[entry.at : entry.at + entry.size]
        if len(data) != entry.size or checksum_of(data, self.header.algorithm) != entry.checksum:
            raise Corrupt(
                f"{self.path}: {name} of step {self.header.step} of rank {self.header.rank} does not match its checksum"
            )
        return data

    def check(self) -> None:
        """Raise `Corrupt` unless every array matches its checksum."""
        for entry in self.manifest.entries:
            if entry.at is not None:
                self.read(entry.name).release()

    def close(self) -> None:
        self._view.release()
        with suppress(BufferError):  # an array that was read is still in use: the mapping goes with it
            self._map.close()


def _entries(listed: list[dict[str, Any]]) -> Iterator[Entry]:
    for each in listed:
        sizes = {name: tuple(each[name]) for name in ("shape", "whole", "offsets")}
        yield Entry(**{**each, **sizes})
