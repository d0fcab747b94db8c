"""The snapshot files of a run as the server reads them, headers only, and their move to disk after its end.

The files belong to ranks, so they are opened as `machine.files` does it, and no link is followed when they are moved.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from basilica.core.checkpoints import SnapshotFound, Tier, worth_keeping
from basilica.machine import files
from basilica.machine.layout import number_of
from basilica.machine.proc import SAFELY
from basilica.progress.snapshot_file import HEADER_BYTES, read_header
from basilica.runtimes.local.run_as import Access
from basilica.runtimes.local.snapshot_dirs import SnapshotDirs

log = logging.getLogger("basilica.runtime")

ENDED = "ended"
HEADERS_MAX = 20_000
COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Name:
    rank: int
    peer: bool


def _parse(name: str) -> _Name | None:
    """Parse `<rank>.<slot>` or `<rank>.<slot>.peer`; None for other files."""
    rank, *rest = name.split(".")
    number = number_of(rank)
    if number is None or not rest or number_of(rest[0]) is None or rest[1:] not in ([], ["peer"]):
        return None
    return _Name(number, rest[1:] == ["peer"])


def find_snapshots(dirs: SnapshotDirs, instance: str) -> list[SnapshotFound]:
    """Return the snapshots of the run that are sealed, in every tier; the newest ones if there are very many."""
    memory, on_disk, kept, ended = dirs.places(instance)
    found: list[SnapshotFound] = []
    for place, tier in ((memory, "memory"), (on_disk, "disk"), (ended, "disk")):
        own: Tier = "memory" if tier == "memory" else "disk"
        found += (each for _, each in _slots(place, own))
    for step in sorted(_numbers(kept), reverse=True):
        for rank in sorted(_numbers(f"{kept}/{step}")):
            if len(found) >= HEADERS_MAX:
                return found
            header = _header(f"{kept}/{step}/{rank}", rank, "disk")
            if header is not None and header.step == step:
                found.append(header)
    return found


def _slots(place: str, tier: Tier) -> Iterator[tuple[str, SnapshotFound]]:
    for name in _names(place):
        parsed = _parse(name)
        if parsed is not None:
            header = _header(f"{place}/{name}", parsed.rank, "peer" if parsed.peer and tier == "memory" else tier)
            if header is not None:
                yield name, header


def _names(place: str) -> list[str]:
    try:
        return sorted(files.names(place, HEADERS_MAX))
    except OSError:  # missing, or replaced by something else: no snapshot can be read there
        return []


def _numbers(place: str) -> list[int]:
    numbers = ((name, number_of(name)) for name in _names(place))
    return [number for name, number in numbers if number is not None and str(number) == name]


def _header(path: str, rank: int, tier: Tier) -> SnapshotFound | None:
    try:
        with files.opened(path) as fd:
            header = read_header(files.read_at(fd, 0, HEADER_BYTES))
    except OSError:
        return None
    if header is None or header.rank != rank:
        return None
    return SnapshotFound(
        step=header.step,
        tier=tier,
        world=header.world,
        rank=header.rank,
        bytes=header.bytes,
        sealed_at=header.sealed_at,
    )


class Interrupted(Exception):
    """The runtime closes: the move goes on after the next start."""


def persist(dirs: SnapshotDirs, instance: str, closing: Callable[[], bool]) -> None:
    """Move the snapshots of an ended run from memory to `checkpoints/snapshots/ended`, then free the memory.

    Each file is whole on disk before its copy in memory goes, so a crash at any moment loses none and a second call
    goes on. A copy for a peer is moved only where the rank's own snapshot of that step is missing.
    """
    memory = dirs.in_memory(instance)
    found = dict(_slots(memory, "memory"))
    disk = [each for each in find_snapshots(dirs, instance) if each.tier == "disk"]
    oldest = worth_keeping([*found.values(), *disk])
    own = {(each.step, each.rank) for each in found.values() if each.tier == "memory"}
    wanted = [
        name
        for name, each in found.items()
        if each.step >= oldest and (each.tier == "memory" or (each.step, each.rank) not in own)
    ]
    if wanted:
        with _made(str(dirs.layout.checkpoints(instance)), ("snapshots", ENDED), dirs.access) as target:
            for name in wanted:
                _copy(f"{memory}/{name}", target, name, dirs.access, closing)
                files.remove(f"{memory}/{name}")
    dirs.remove(instance)


@contextmanager
def _made(place: str, below: tuple[str, ...], access: Access) -> Iterator[int]:
    """Yield a descriptor of a directory below the ranks' own, made without following a link, and theirs as well."""
    with files.directory(place, os.O_RDONLY) as top:
        fd = os.dup(top)
    try:
        for name in below:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
            if access.ids is not None and os.fstat(fd).st_uid == os.geteuid():
                os.fchown(fd, *access.ids)
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _copy(source: str, target: int, name: str, access: Access, closing: Callable[[], bool]) -> None:
    """Copy the file to disk under another name, and rename it when it is whole there."""
    draft = f".{name}.moving"
    with suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=target)  # of an interrupted move
    with files.opened(source) as reading:
        writing = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o600, dir_fd=target)
        try:
            if access.ids is not None:
                os.fchown(writing, *access.ids)
            size, offset = os.fstat(reading).st_size, 0
            while offset < size and (piece := os.pread(reading, min(COPY_BYTES, size - offset), offset)):
                if closing():
                    raise Interrupted
                written = memoryview(piece)
                while written:
                    written = written[os.write(writing, written) :]
                offset += len(piece)
            os.fsync(writing)
        finally:
            os.close(writing)
    os.rename(draft, name, src_dir_fd=target, dst_dir_fd=target)
    os.fsync(target)
