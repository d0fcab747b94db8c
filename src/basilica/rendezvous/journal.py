"""The journal of one keyspace: each write, in order, before it is done and answered.

Two files. `journal` has a line for each write, `<crc32> <json>`, numbered by the keyspace's raft index; `snapshot` has
the whole keyspace as it stood after some number. What is in memory is always snapshot plus journal, because the
keyspace is deterministic: a write that fails is in the journal too, and fails again when it is replayed.

What is promised:
- A write is answered once its line is with the operating system. Killing the process, in whatever way, loses nothing
  that was answered.
- The file is synced to disk about `FSYNC_EVERY_S` after it was written, many writes at a time (torchelastic's
  keep-alives alone are several writes a second for each run). A power cut may lose that last second.
- A snapshot is on disk before it replaces the old one, and the journal is emptied after that. A crash in between
  repeats nothing, since lines up to the snapshot's number are skipped.
- A last line that was cut short was never answered, and is dropped. Damage before the last line is `JournalDamaged`,
  never a guess.
- Deadlines are absolute: time goes on while the service is down.
"""

import json
import os
import zlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from basilica.rendezvous.keyspace import EtcdError, Keyspace, Request

FSYNC_EVERY_S = 1.0
COMPACT_BYTES = 4 << 20

_DEFAULTS = {f.name: f.default for f in fields(Request)}


class JournalDamaged(Exception):
    """`path` cannot be read at `offset`, and what stands there is not merely an unfinished last line."""

    def __init__(self, path: Path, offset: int) -> None:
        super().__init__(path, offset)
        self.path, self.offset = path, offset

    def __str__(self) -> str:
        return f"{self.path} is damaged at byte {self.offset}"


class Journal:
    """The files of one keyspace in a folder of its own. `keyspace` is what they hold, and only changes through them."""

    def __init__(self, folder: Path, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self.folder = folder
        self.dirty = False
        self._compact_bytes = compact_bytes
        self._broken: OSError | None = None
        snapshot, path = folder / "snapshot", folder / "journal"
        self.keyspace = Keyspace.load(_read_snapshot(snapshot)) if snapshot.exists() else Keyspace()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._size = _replay(path, self.keyspace)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def record(self, request: Request, now: int) -> None:
        """Note a write that is about to be done. An `OSError` means that it must not be."""
        self._append({"at": now, "do": {k: v for k, v in asdict(request).items() if v != _DEFAULTS[k]}})

    def record_sync(self, now: int) -> None:
        """Note that what has expired at `now` is about to be removed."""
        self._append({"at": now})

    def compact(self) -> bool:
        """Replace a long journal by a snapshot; call it between writes."""
        if self._size < self._compact_bytes:
            return False
        write_snapshot(self.folder, self.keyspace)
        os.ftruncate(self._fd, 0)
        self._size = 0
        return True

    def fsync(self) -> None:
        self.dirty = False
        os.fdatasync(self._fd)

    def dup(self) -> int:
        """The journal's file once more, for whoever syncs it elsewhere while this one may be closed."""
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
        text = json.dumps(record, separators=(",", ":")).encode()
        line = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            self._undo(error)
            raise
        self._size += len(text) + 10
        self.dirty = True

    def _undo(self, why: OSError) -> None:
        """Take half a line back. If not even that works nothing may follow it."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._broken = why


def write_snapshot(folder: Path, keyspace: Keyspace) -> None:
    """Keep `keyspace` as it is now in `folder`."""
    text = json.dumps(keyspace.dump(), separators=(",", ":")).encode()
    replace_file(folder / "snapshot", b"%08x %s\n" % (zlib.crc32(text), text))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, on disk when this returns."""
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_snapshot(path: Path) -> dict[str, Any]:
    state = _checked(path.read_bytes().removesuffix(b"\n"))
    if state is None:
        raise JournalDamaged(path, 0)
    return state


def _replay(path: Path, keyspace: Keyspace) -> int:
    """Do again what the journal says; returns how much of it is good."""
    content = path.read_bytes()
    good = 0
    while good < len(content):
        end = content.find(b"\n", good)
        record = _checked(content[good:end]) if end >= 0 else None
        if record is None:
            if 0 <= end < len(content) - 1:
                raise JournalDamaged(path, good)
            break
        if record["n"] > keyspace.raft_index:
            if record["n"] != keyspace.raft_index + 1:
                raise JournalDamaged(path, good)
            _redo(keyspace, record)
        good = end + 1
    return good


def _redo(keyspace: Keyspace, record: dict[str, Any]) -> None:
    if "do" not in record:
        keyspace.sync(record["at"])
        return
    try:
        keyspace.write(Request(**record["do"]), record["at"])
    except EtcdError:
        return  # it failed the first time, too


def _checked(line: bytes) -> dict[str, Any] | None:
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    record: dict[str, Any] = json.loads(text)
    return record
