"""What the control plane tells the fork server about the ranks to start: the shape of one request and its answer."""

from typing import NotRequired, TypedDict


class CgroupTask(TypedDict):
    """One control group to make. `settings` are (file, value); a file that is not there is left out.

    `home` is the group that the supervisor came from and goes back to.
    """

    path: str
    home: str
    settings: list[tuple[str, str]]
    limits_memory: bool


class RankTask(TypedDict):
    """One rank to start, with its files in `directory`. `env` is added to the request's; nothing of it goes to disk.

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
    """Ranks of one run. `memory_limit` is for machines that limit no memory by control groups.

    `grace` is for a stop that could not say its own, the disk being full. `clock_zero` is the moment at which the
    kernel's counter of seconds since boot was zero, on the time line of who asks: the moments in records are on it.
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
    """The supervisors' pids in the order of the ranks, as far as it got; `error` says why it stopped."""

    pids: list[int]
    error: str | None


class CommandTask(TypedDict):
    """A command beside a rank, in the groups of the rank's newest attempt. `memory_limit` as in a `StartRequest`."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    cgroups: list[CgroupTask]
    memory_limit: int | None
