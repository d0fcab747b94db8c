"""The state of a process before it spawns a rank: its directory, limits, user and signals, which the rank inherits."""

from __future__ import annotations

import errno
import os
import resource
import signal
from contextlib import contextmanager, suppress

from basilica.core.ends import CANNOT_EXECUTE, NOT_FOUND

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def changed_signals() -> list[int]:
    """Return the signals without their default action: changed by Python, by us, or inherited from our parent."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) not in (signal.SIG_DFL, None)]


def enter(directory: str) -> tuple[int, str] | None:
    try:
        os.chdir(directory)
    except FileNotFoundError:
        return NOT_FOUND, f"no such directory: {directory}"
    except NotADirectoryError:
        return NOT_FOUND, f"not a directory: {directory}"
    except OSError as error:
        return CANNOT_EXECUTE, f"cannot enter directory {directory}: {error.strerror}"
    return None


@contextmanager
def memory_rlimit(limit: int | None) -> Iterator[None]:
    """Apply the kernel's memory limit per process, which serves where no control group limits memory."""
    if limit is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError, ValueError):  # more than this user may have: the machine's own limit stays
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def real_user(user: tuple[int, int] | None) -> Iterator[None]:
    """Take the rank's user and group as real ids: a process spawned with `resetids` then has no others, and the caller
    keeps its rights. This lasts only for the spawn, since the real user of a process may signal it."""
    if user is None:
        yield
        return
    uids, gids = os.getresuid(), os.getresgid()
    os.setgroups([])
    os.setresgid(user[1], gids[1], gids[2])
    os.setresuid(user[0], uids[1], uids[2])
    try:
        yield
    finally:
        os.setresuid(*uids)
        os.setresgid(*gids)


def candidates(program: str, path: str) -> list[str]:
    """Return the paths at which the program exists, in the order of PATH."""
    if "/" in program:
        return [program]
    places = [os.path.join(directory or ".", program) for directory in path.split(":")]
    return [place for place in places if os.path.isfile(place)]


def exec_problem(program: str, error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return f"not a program: {program} (it has neither a known binary format nor a #! line)"
    if error.errno == errno.E2BIG:
        return "the arguments and the environment together are longer than the kernel takes"
    return f"cannot execute {program}: {error.strerror}"
