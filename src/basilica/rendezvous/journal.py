"""The journal of one keyspace: each write, in order, recorded before it is applied and answered.

Two files of lines, `<crc32> <json>`. `journal` has a line for each write, numbered by the keyspace's raft index;
`snapshot` has the whole keyspace as it stood after some number: a head, then a line for each key and for each event of
the history. The state in memory is always snapshot plus journal, because the keyspace is deterministic: a write that
fails is in the journal too, and fails again when it is replayed.

Guarantees:
- A write is answered once its line is with the operating system. Killing the process, in whatever way, loses nothing
  that was answered.
- The file is synced to disk about `FSYNC_EVERY_S` after it was written, many writes at a time (torchelastic's
  keep-alives alone are several writes a second for each run). A power cut may lose that last second.
- A snapshot is on disk before it replaces the old one, and its writes are cut off the journal after that. A crash in
  between repeats nothing, since lines up to the snapshot's number are skipped. It is written outside the event loop,
  line by line, so that no request waits for it.
- A last line that was cut short was never answered, and is dropped. Any other damage is `JournalDamaged`, never a
  guess: a line with a wrong checksum, one that this version does not understand, a gap, or an entry that is no
  regular file.
- Deadlines are absolute: time goes on while the service is down.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from basilica.rendezvous.files import discard, discard_directory, open_regular, read_regular, sync_folder
from basilica.rendezvous.keyspace import EtcdError, Keyspace, Request

FSYNC_EVERY_S = 1.0
COMPACT_BYTES = 4 << 20
FILE_BYTES_MAX = 2 << 30  # far beyond a keyspace's quota

_DEFAULTS = {f.name: f.default for f in fields(Request)}


class JournalDamaged(Exception):
    """`path` cannot be read at `offset`, and not merely because of an unfinished last line."""

    def __init__(self, path: Path, offset: int, why: str = "") -> None:
        super().__init__(path, offset, why)
        self.path, self.offset, self.why = path, offset, why

    def __str__(self) -> str:
        return f"{self.path} is damaged at byte {self.offset}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Compaction:
    """A snapshot to be written: the keyspace after the first `cut` bytes of its journal."""

    folder: Path
    state: dict[str, Any]
    cut: int

    def write(self) -> int:
        """Put the snapshot on disk, in place of the old one; return its size. May run in another thread."""
        return _write_snapshot(self.folder, self.state)


class Journal:
    """The files of one keyspace in a folder of its own. `keyspace` is their content, and only changes through them."""

    def __init__(self, folder: Path, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self.folder = folder
        self.dirty = False
        self._compact_bytes = compact_bytes
        self._broken: OSError | None = None
        self._path = folder / "journal"
        self.keyspace, self._snapshot_size = _read_snapshot(folder / "snapshot")
        try:
            self._fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise JournalDamaged(self._path, 0, str(error.strerror)) from error
        try:
            self._size = _replay(self._path, self.keyspace)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def record(self, request: Request, now: int) -> None:
        """Record a write that is about to be applied. After an `OSError` it must not be."""
        self._append({"at": now, "do": {k: v for k, v in asdict(request).items() if v != _DEFAULTS[k]}})

    def record_sync(self, now: int) -> None:
        """Record that the keys expired at `now` are about to be removed."""
        self._append({"at": now})

    def compact(self) -> bool:
        """Replace a long journal by a snapshot, here and now."""
        begun = self.begin_compaction()
        if begun is None:
            return False
        self.finish_compaction(begun, begun.write())
        return True

    def begin_compaction(self) -> Compaction | None:
        """Return the snapshot to write in place of the journal, if the journal is long in proportion to the last
        snapshot.
        """
        if self._size < max(self._compact_bytes, self._snapshot_size):
            return None
        return Compaction(self.folder, self.keyspace.dump(), self._size)

    def finish_compaction(self, done: Compaction, size: int) -> None:
        """Cut the snapshot's writes off the journal; later writes stay."""
        self._snapshot_size = size
        if self._fd < 0:
            return  # closed meanwhile: the next journal skips the snapshot's writes
        if self._size == done.cut:
            os.ftruncate(self._fd, 0)
            self._size = 0
            return
        draft = self._path.with_name("journal.new")
        discard(draft)
        tail = os.pread(self._fd, self._size - done.cut, done.cut)
        fd = open_regular(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            if os.write(fd, tail) != len(tail):
                raise OSError(f"{draft} cannot be written whole")
            discard_directory(self._path)
            draft.replace(self._path)
        except BaseException:
            os.close(fd)
            raise
        self._fd, before = fd, self._fd
        os.close(before)
        self._size, self.dirty = len(tail), True

    def fsync(self) -> None:
        self.dirty = False
        os.fdatasync(self._fd)

    def dup(self) -> int:
        """Return a duplicate descriptor, for a sync in another thread while this one may be closed."""
        self.dirty = False
        return os.dup(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self.fsync()
            os.close(self._fd)
            self._fd = -1

    def _append(self, record: dict[str, Any]) -> None:
        if self._broken is not None:
            raise self._broken
        record["n"] = self.keyspace.raft_index + 1
        whole = _line(record)
        line = memoryview(whole)
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            self._undo(error)
            raise
        self._size += len(whole)
        self.dirty = True

    def _undo(self, why: OSError) -> None:
        """Take half a line back. If not even that works nothing may follow it."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._broken = why


def write_snapshot(folder: Path, keyspace: Keyspace) -> None:
    """Write `keyspace` as it is now to `folder`."""
    _write_snapshot(folder, keyspace.dump())


def _write_snapshot(folder: Path, state: dict[str, Any]) -> int:
    path, draft = folder / "snapshot", folder / "snapshot.new"
    discard(draft)
    fd = open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "wb") as file:
        for record in _records(state):
            file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    discard_directory(path)
    draft.replace(path)
    sync_folder(folder)
    return size


def _records(state: dict[str, Any]) -> Iterator[Any]:
    head = {key: value for key, value in state.items() if key not in ("nodes", "history")}
    yield head | {"lines": len(state["nodes"]) + len(state["history"])}
    for kind in ("nodes", "history"):
        for record in state[kind]:
            yield [kind, record]


def _read_snapshot(path: Path) -> tuple[Keyspace, int]:
    """Return the keyspace in the file and the file's size; a new keyspace where there is no file."""
    if not os.path.lexists(path):
        return Keyspace(), 0
    try:
        content = read_regular(path, FILE_BYTES_MAX)
    except OSError as error:
        raise JournalDamaged(path, 0, str(error.strerror)) from error
    try:
        head, *rest = map(_checked, content.removesuffix(b"\n").split(b"\n"))
        if head is None or None in rest or head.get("lines", 0) != len(rest):
            raise JournalDamaged(path, 0)
        if "nodes" not in head:
            head |= {"nodes": [], "history": []}
            for kind, record in rest:
                head[kind].append(record)
        return Keyspace.load(head), len(content)
    except JournalDamaged:
        raise
    except Exception as error:  # any other content is no snapshot of ours
        raise JournalDamaged(path, 0, f"{type(error).__name__}: {error}") from error


def _replay(path: Path, keyspace: Keyspace) -> int:
    """Apply the journal's writes again; return how many of its bytes are good."""
    try:
        content = read_regular(path, FILE_BYTES_MAX)
    except OSError as error:
        raise JournalDamaged(path, 0, str(error.strerror)) from error
    good = 0
    while good < len(content):
        end = content.find(b"\n", good)
        record = _checked(content[good:end]) if end >= 0 else None
        if record is None:
            if 0 <= end < len(content) - 1:
                raise JournalDamaged(path, good)
            break
        try:
            follows = _redo(keyspace, record)
        except Exception as error:  # written by another version or program
            raise JournalDamaged(path, good, f"{type(error).__name__}: {error}") from error
        if not follows:
            raise JournalDamaged(path, good, "writes are missing before it")
        good = end + 1
    return good


def _redo(keyspace: Keyspace, record: dict[str, Any]) -> bool:
    """Apply a write again unless the keyspace has it; False if one before it is missing."""
    if record["n"] <= keyspace.raft_index:
        return True
    if record["n"] != keyspace.raft_index + 1:
        return False
    if "do" not in record:
        keyspace.sync(record["at"])
        return True
    with contextlib.suppress(EtcdError):  # it failed the first time, too
        keyspace.write(Request(**record["do"]), record["at"])
    return True


def _line(record: Any) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _checked(line: bytes) -> Any:
    """Return the line's record; None if its checksum is wrong."""
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    return json.loads(text)
