"""The state directory: its permissions, its identity while the server runs, and its troubles."""

import json
import os
import stat
import time
from pathlib import Path

from basilica.core.damage import Trouble
from basilica.core.errors import DiskFull, StoreUnavailable
from basilica.machine.private_files import write_private
from basilica.machine.reserve import Reserve

RESERVE_FILE = "reserve"
LOSSES_FILE = "losses.json"  # losses that were found, until they are repaired
QUARANTINE = "quarantine"
LEAST_FREE = 128 << 10  # beside the reserve: below this a new run could not even begin
REPAIR = "stop the server (its ranks go on), run 'basilica doctor --repair', and start it again"

Identity = tuple[int, int]


def unsafe(path: Path) -> str | None:
    """Return why others can write into the directory, and the remedy; None if they cannot."""
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        return f"others can write into it (mode {mode:04o}): run 'chmod 700 {path}', or choose another --state-dir"
    if found.st_uid not in (os.geteuid(), 0):
        return (
            f"it belongs to another user (uid {found.st_uid}), who can write into it: run 'chown {os.geteuid()} {path}'"
            ", or choose another --state-dir"
        )
    return None


def tighten(path: Path) -> None:
    """Restrict the directory and the files in it to the owner, also those that an earlier version made.

    A directory that the ranks' group may only pass through stays so: their ranks may be there.
    """
    if path.stat().st_mode & 0o067:
        path.chmod(0o700)
    for entry in os.scandir(path):
        if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mode & 0o077:
            os.chmod(entry.path, 0o600)


class StateDirectory:
    """The directory in use by this server. `needed` are the entries that must stay the same files from the start."""

    def __init__(self, path: Path, needed: tuple[str, ...]) -> None:
        self.path = path
        self.reserve = Reserve(path / RESERVE_FILE)
        self._needed = needed
        self._known: dict[str, Identity] = {}
        self._losses: list[Trouble] = []
        self._seen: list[Trouble] = []

    def open(self) -> None:
        """Open the reserve; on a full disk, release a part of it so that the server can start at all."""
        self.reserve.open()
        while self.reserve.free() < LEAST_FREE and self.reserve.release():
            pass
        self._losses = read_losses(self.path)

    def watch_over(self) -> None:
        """Record the identity of the directory and its needed entries: from now on they must stay the same."""
        self._known = {name: _identity(self.path / name) for name in ("", *self._needed)}

    def gone(self) -> str | None:
        """Return which entry was deleted or replaced; None while all are the same."""
        for name, known in self._known.items():
            try:
                same = _identity(self.path / name) == known
            except OSError:
                same = False
            if not same:
                return f"{self.path / name} was deleted or replaced while the server used it"
        return None

    def admit(self) -> None:
        """Raise an error if a new run could not be stored: the directory is gone, or its disk is full."""
        gone = self.gone()
        if gone is not None:
            raise StoreUnavailable(f"{gone}: no new runs are taken; {REPAIR}")
        if not self.reserve.refill() or self.reserve.free() < LEAST_FREE:
            raise DiskFull(
                f"the disk is full: there is no space for a new run in {self.path}; delete runs or free space "
                "(cancel and delete still work)"
            )

    def lost(self, trouble: Trouble) -> None:
        """Persist a loss until it is repaired, over restarts too."""
        if trouble not in self._losses:
            self._losses.append(trouble)
            self.reserve.spend(lambda: write_losses(self.path, self._losses))

    def found(self, trouble: Trouble) -> None:
        """Show a trouble until the server ends: the next server detects it again."""
        self._seen.append(trouble)

    def troubles(self) -> list[Trouble]:
        found = [*self._losses, *self._seen]
        gone = self.gone()
        if gone is not None:
            message = f"{gone}: what is recorded now may be lost, and no new runs are taken"
            found.append(Trouble(kind="StateDirectoryGone", message=message, remedy=REPAIR))
        elif not self.reserve.refill() or self.reserve.free() < LEAST_FREE:
            message = f"the disk of {self.path} is full: no new runs are taken; cancel and delete still work"
            found.append(Trouble(kind="DiskFull", message=message, remedy="delete runs, or free space on that disk"))
        return found


def _identity(path: Path) -> Identity:
    found = path.stat()
    return found.st_dev, found.st_ino


def read_losses(directory: Path) -> list[Trouble]:
    try:
        return [Trouble(**row["trouble"]) for row in json.loads((directory / LOSSES_FILE).read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        message = f"{directory / LOSSES_FILE}, which lists losses, cannot be read"
        return [Trouble(kind="LossesUnreadable", message=message, remedy=REPAIR)]


def write_losses(directory: Path, troubles: list[Trouble]) -> None:
    rows = [
        {"trouble": {"kind": t.kind, "message": t.message, "remedy": t.remedy}, "written_at": time.time()}
        for t in troubles
    ]
    write_private(directory / LOSSES_FILE, json.dumps(rows).encode(), durable=True)
