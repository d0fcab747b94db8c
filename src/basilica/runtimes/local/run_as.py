"""The user that ranks run as, and the part of the state directory that this user can reach.

The group of this user may pass through, not list, the state directory and the path to a run's directory. Below the run,
the directories that ranks write (checkpoints, results, reports, their unpacked directory) belong to the user. Records,
stop files, the database, keys and other users' archives stay the server's.
"""

import os
import pwd
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from basilica.runtimes.local import become

PASSAGE = 0o710
BELL = 0o620
SHOWN = 0o640
PERSONAL = ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME", "TORCH_HOME")  # these are the server's, not the user's


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    name: str
    uid: int
    gid: int
    home: str
    shell: str


def find_user(name: str) -> User:
    """Return the user; `ValueError` with the next step if ranks cannot run as that user."""
    if os.geteuid() != 0:
        raise ValueError("only a server that runs as root can start ranks as another user")
    try:
        found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        raise ValueError(f"there is no user {name!r} here; make one with 'useradd --system {name}'") from None
    if found.pw_uid == 0:
        raise ValueError("ranks that run as root can read everything: give a user without privileges")
    return User(name=found.pw_name, uid=found.pw_uid, gid=found.pw_gid, home=found.pw_dir, shell=found.pw_shell)


def may_enter(found: os.stat_result, user: User) -> bool:
    """Return True if that user may pass through a directory."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == user.uid:
        return bool(mode & 0o100)
    return bool(mode & (0o010 if found.st_gid == user.gid else 0o001))


def closed_to(user: User, directory: Path) -> Path | None:
    """Return the first directory above this one that the user may not enter; None if there is none."""
    return next((place for place in reversed(directory.parents) if not may_enter(place.stat(), user)), None)


@dataclass(frozen=True, slots=True)
class Access:
    """Changes files and commands so that ranks reach the files that they need. Without a user, it changes nothing."""

    user: User | None = None

    @property
    def ids(self) -> tuple[int, int] | None:
        return None if self.user is None else (self.user.uid, self.user.gid)

    def passage(self, directory: Path) -> None:
        """Let the user pass through the directory, not list it."""
        if self.user is not None:
            os.chown(directory, -1, self.user.gid, follow_symlinks=False)
            os.chmod(directory, PASSAGE)

    def give(self, directory: Path) -> None:
        """Make a directory in one of the server's own, and give it to the ranks' user."""
        directory.mkdir(mode=0o700, exist_ok=True)
        if self.user is not None:
            os.chown(directory, self.user.uid, self.user.gid, follow_symlinks=False)

    def give_tree(self, directory: Path) -> None:
        """Give a directory with its contents to the user: the directory last, so that no rank enters it earlier, and a
        half-given one is given again."""
        if self.user is None or directory.lstat().st_uid == self.user.uid:
            return
        for _, directories, files, place in os.fwalk(directory, topdown=False):
            for name in (*directories, *files):
                os.chown(name, self.user.uid, self.user.gid, dir_fd=place, follow_symlinks=False)
        os.chown(directory, self.user.uid, self.user.gid, follow_symlinks=False)

    def show(self, path: str) -> None:
        """Let the user read a file of the server."""
        if self.user is not None:
            os.chown(path, -1, self.user.gid, follow_symlinks=False)
            os.chmod(path, SHOWN)

    def bell(self, path: Path) -> None:
        """Let the user write to the wake pipe."""
        if self.user is not None:
            os.chown(path, -1, self.user.gid, follow_symlinks=False)
            os.chmod(path, BELL)

    def environment(self, server: Mapping[str, str]) -> dict[str, str]:
        """Return the server's environment, adapted to the user of ranks."""
        if self.user is None:
            return dict(server)
        own = {"HOME": self.user.home, "USER": self.user.name, "LOGNAME": self.user.name, "SHELL": self.user.shell}
        return {name: value for name, value in server.items() if name not in PERSONAL} | own

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return a command line for the server that executes this one as the user."""
        if self.user is None:
            return list(argv)
        return [sys.executable, "-I", "-S", become.__file__, str(self.user.uid), str(self.user.gid), *argv]
