"""The snapshot directories of runs in the memory of this machine: BASILICA_SNAPSHOT_DIR.

    /dev/shm/basilica-<mark>/        the server's own, 0700; with --run-as its user may pass through
    ├── state-dir                    the state directory that it belongs to
    └── <instance>/                  0700, of the user that ranks run as

Everybody may make files in /dev/shm, so the upper directory is used only if it is a directory of this user that others
cannot write and that names this state directory. Else, or where /dev/shm is no tmpfs, the directory is on disk, in
the run's own. A run stays where it began, unless the machine was restarted.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from basilica.machine import files
from basilica.machine.layout import Layout
from basilica.runtimes.local.run_as import PASSAGE, Access

MEMORY = "/dev/shm"
PREFIX = "basilica-"
OWNER_FILE = "state-dir"
PATH_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDirs:
    """Makes, finds and removes the snapshot directories of one state directory."""

    layout: Layout
    mark: str
    access: Access
    memory: str = MEMORY

    @property
    def home(self) -> str:
        return f"{self.memory}/{PREFIX}{self.mark}"

    def in_memory(self, instance: str) -> str:
        return f"{self.home}/{instance}"

    def make(self, instance: str) -> str:
        """Make the run's directory, in memory if that is safe, and return its path."""
        on_disk = self.layout.snapshots(instance)
        if not on_disk.exists() and is_memory(self.memory):
            try:
                self._make_home()
                self.access.give(Path(self.in_memory(instance)))
                return self.in_memory(instance)
            except OSError:  # occupied by another user, or full
                pass
        self.access.give(on_disk)
        return str(on_disk)

    def used(self, instance: str) -> str:
        """Return the directory that the run was given."""
        on_disk = self.layout.snapshots(instance)
        return str(on_disk) if on_disk.exists() else self.in_memory(instance)

    def places(self, instance: str) -> list[str]:
        """Return all directories that may have snapshots of the run. A move puts a file into a later one first."""
        kept = str(self.layout.checkpoints(instance) / "snapshots")
        return [self.in_memory(instance), str(self.layout.snapshots(instance)), kept, f"{kept}/ended"]

    def held(self) -> list[str]:
        """Return the runs that have a directory in memory."""
        try:
            self._check_home()
            return files.names(self.home, None, lambda name: "." not in name and name != OWNER_FILE)
        except OSError:
            return []

    def remove(self, instance: str) -> None:
        """Remove the run's directory in memory, and the upper one with the last of them."""
        if instance in self.held():
            files.remove(self.in_memory(instance))
        with suppress(OSError):
            if files.names(self.home) == [OWNER_FILE]:
                self._check_home()
                os.unlink(f"{self.home}/{OWNER_FILE}")
                os.rmdir(self.home)

    def remove_orphans(self) -> None:
        """Remove the directories of runs that the state directory does not have any more."""
        for instance in self.held():
            if not self.layout.run(instance).exists():
                self.remove(instance)

    def _make_home(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(self.home, 0o700)
        self._check_home(marked=False)
        if not os.path.lexists(f"{self.home}/{OWNER_FILE}"):
            files.write(f"{self.home}/{OWNER_FILE}", bytes(self.layout.root))
        self._check_home()
        self.access.passage(Path(self.home))

    def _check_home(self, *, marked: bool = True) -> None:
        """`OSError` unless the upper directory is this server's own."""
        if not _is_own(os.lstat(self.home)):
            raise PermissionError(f"{self.home} is not a directory of this user alone")
        if marked and _owner_of(self.home) != bytes(self.layout.root):
            raise FileExistsError(f"{self.home} belongs to another state directory")


def is_memory(path: str) -> bool:
    """Return whether a tmpfs is mounted there that this user can write."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    kinds = [fields[2] for fields in map(str.split, mounts) if len(fields) > 2 and fields[1] == path]
    return kinds[-1:] == ["tmpfs"] and os.access(path, os.W_OK | os.X_OK)


def leftovers(memory: str = MEMORY) -> Iterator[tuple[str, str]]:
    """Yield the directories of this user whose state directory does not exist any more, with that directory."""
    with suppress(OSError):
        for name in files.names(memory, None, lambda name: name.startswith(PREFIX)):
            path = f"{memory}/{name}"
            with suppress(OSError):
                if _is_own(os.lstat(path)):
                    owner = os.fsdecode(_owner_of(path))
                    if owner.startswith("/") and not os.path.lexists(owner):
                        yield path, owner


def _is_own(found: os.stat_result) -> bool:
    mode = stat.S_IMODE(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not mode & ~PASSAGE & 0o077


def _owner_of(home: str) -> bytes:
    return files.read(f"{home}/{OWNER_FILE}", PATH_BYTES_MAX)
