"""The names of a process's end: its exit code, its signal, its reason. Pure.

Every runtime and executor, the agent in a pod and the supervisor of a local rank call these functions. The supervisor
is copied for each rank, so this module imports nothing of ours and nothing that costs time or memory.
"""

import errno
import signal

OF_SIGNALS, LAST_SIGNAL = 128, 64
KILLED = OF_SIGNALS + signal.SIGKILL
TERMINATED = OF_SIGNALS + signal.SIGTERM
CANNOT_EXECUTE, NOT_FOUND = 126, 127  # what a shell exits with for a program that it cannot start

COMPLETED, ERROR, OOM_KILLED = "Completed", "Error", "OOMKilled"
CANCELLED, START_ERROR, UNKNOWN = "Cancelled", "StartError", "Unknown"
NODE_LOST = "NodeLost"
ENDED_BY_PLATFORM = "Terminated"  # the agent was told to end; on Kubernetes the pod's conditions have the cause
FENCED = "Fenced"  # the agent was cut off from the rendezvous, and ended its rank

SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a start that pass by themselves and are nobody's fault: the start is tried again."""
START_AGAIN_AFTER_SECONDS, START_AGAIN_AT_MOST_SECONDS = 0.1, 10.0
"""The first pause between two tries, and the longest."""


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals, which have none in Python, are named by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_signal(reason: str) -> bool:
    """Return whether the reason of an end is the name of a signal."""
    return reason.startswith(("SIG", "signal "))


def exit_code_of(code: int) -> int:
    """The exit code that users see, of a code as Python has it: -n, for a death by signal n, is 128+n."""
    return code if code >= 0 else OF_SIGNALS - code


def killer_of(code: int) -> "str | None":
    """The name of the signal that ended the process, of a code as Python has it; None if it exited by itself."""
    return signal_name(-code) if code < 0 else None


def killer_in(exit_code: int) -> "str | None":
    """The name of the signal that an exit code stands for where nothing else is known of the end, as in a container."""
    number = exit_code - OF_SIGNALS
    return signal_name(number) if 0 < number <= LAST_SIGNAL else None


def describe(code: int) -> str:
    """The end as part of a sentence, of a code as Python has it."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def reason_of(
    exit_code: "int | None",
    killer: "str | None",
    *,
    memory_kills: int = 0,
    stopped: bool = False,
    start_error: "str | None" = None,
) -> str:
    """Return the reason of an attempt's end, by evidence only.

    A memory kill counts if it ended the rank: by SIGKILL, or as the 137 with which a shell passes on that of its child.
    A rank that handled the kill of a child and exits with a code of its own has failed by itself.
    """
    if stopped:
        return CANCELLED
    if start_error is not None:
        return START_ERROR
    if exit_code == 0:
        return COMPLETED
    if memory_kills and exit_code == KILLED:
        return OOM_KILLED
    return killer or ERROR


def memory_kills_in(events: str) -> int:
    """The number of kills for want of memory in a control group's `memory.events` or `memory.oom_control`."""
    fields = (line.partition(" ") for line in events.splitlines())
    return sum(int(value) for name, _, value in fields if name == "oom_kill" and value.strip().isdecimal())
