"""`prctl`: the kernel's settings of one process."""

from __future__ import annotations

import ctypes
import sys

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        libc.prctl(option, argument, 0, 0, 0)
