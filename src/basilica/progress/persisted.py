"""Persistent snapshots: copies of those in memory, on a disk that all hosts share, made in the background.

    <directory>/<step>/<rank>      whole or not at all: a file gets its name when all of it is on the disk

The newest complete steps stay; older ones are removed when a newer one is complete.
"""

import os
import shutil
import threading
from contextlib import suppress

from basilica.progress.choice import Copy, Tier, complete_steps
from basilica.progress.memory import Reading
from basilica.progress.snapshot_file import header_of

STEPS_KEPT = 2


class Persisting:
    """The thread that writes persistent snapshots, one at a time."""

    def __init__(self, directory: str, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._thread: threading.Thread | None = None
        self.step: int | None = None  # of the newest one that this process has written
        self.problem: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, reading: Reading) -> None:
        """Write the snapshot in the background. It is not overwritten meanwhile."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(reading,), name="basilica-persist", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the write that is under way; return whether it ended in time."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy

    def _write(self, reading: Reading) -> None:
        try:
            persist(reading.path, f"{self._directory}/{reading.step}", self._rank)
            self.step, self.problem = reading.step, None
            if self._rank == 0:
                remove_older(self._directory)
        except OSError as error:
            self.problem = str(error)
        finally:
            reading.done()


def persist(source: str, directory: str, rank: int) -> None:
    """Copy a snapshot file to the disk, durable when this returns."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    name = f"{directory}/{rank}"
    unfinished = f"{directory}/.{rank}.{os.getpid()}"
    try:
        with open(source, "rb") as file, open(unfinished, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(unfinished, name)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
    for changed in (directory, os.path.dirname(directory)):
        fd = os.open(changed, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def copies_on_disk(directory: str) -> list[Copy]:
    """Return the persistent snapshots. `<directory>` itself may hold files too: those of a run that has ended."""
    found = []
    for folder in (directory, *_folders(directory)):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    header = header_of(entry.path)
                    if header is not None:
                        found.append(Copy(header, Tier.DISK, "", entry.path))
    return found


def _folders(directory: str) -> list[str]:
    with suppress(OSError), os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def remove_older(directory: str) -> None:
    """Remove the steps before the newest complete ones."""
    kept = {choice.step for choice in complete_steps(copies_on_disk(directory))[:STEPS_KEPT]}
    if len(kept) < STEPS_KEPT:
        return
    for folder in _folders(directory):
        name = os.path.basename(folder)
        if name.isascii() and name.isdigit() and int(name) < min(kept):
            shutil.rmtree(folder, ignore_errors=True)
