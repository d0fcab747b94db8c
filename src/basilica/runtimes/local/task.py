"""The messages between the control plane and the fork server: a request to start ranks, and its answer."""

from typing import NotRequired, TypedDict


class CgroupTask(TypedDict):
    """One control group to make. `settings` are (file, value); a missing file is skipped.

    `home` is the group that the supervisor comes from and returns to.
    """

    path: str
    home: str
    settings: list[tuple[str, str]]
    limits_memory: bool


class RankTask(TypedDict):
    """One rank to start, with its files in `directory`. `env` is added to the request's; it is never written to disk.

    `argv` is this rank's own command line, None if it is the request's.
    """

    instance: str
    rank: int
    attempt: int
    directory: str
    argv: list[str] | None
    env: dict[str, str]
    gpus: list[str]
    cgroups: list[CgroupTask]
    memory_events: str | None
    kill_file: str | None
    freezer: str | None


class StartRequest(TypedDict):
    """The ranks of one run to start. `memory_limit` is for machines whose control groups limit no memory.

    `grace` applies to a stop whose own grace could not be written, the disk being full. `clock_zero` is the time, by
    the requesting server's clock, at which the kernel's counter of seconds since boot was zero; records use that clock.
    `user`: the uid and gid that ranks run as, if not the server's.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    grace: float
    memory_limit: int | None
    log_limit: int
    wake: str
    clock_zero: float
    ranks: list[RankTask]
    user: NotRequired[tuple[int, int] | None]


class StartReply(TypedDict):
    """The pids of the started supervisors in the order of the ranks; `error` is why the rest was not."""

    pids: list[int]
    error: str | None


class CommandTask(TypedDict):
    """A command beside a rank, in the groups of the rank's newest attempt. `memory_limit` as in a `StartRequest`."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    cgroups: list[CgroupTask]
    memory_limit: int | None
