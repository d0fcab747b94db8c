"""A process that outlives its cluster when that is killed, and ends what the cluster's pods have started."""

import os
import subprocess
import sys
from collections.abc import Mapping

from basilica_testkube import strays


class Warden:
    """Watches over this process from outside. Start it before the first process that it is to end.

    It does not die with us: it has a session of its own, and variables of `env` alone, which mark it as nobody's.
    """

    def __init__(self, mark: str, env: Mapping[str, str]) -> None:
        pidfd = os.pidfd_open(os.getpid())
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", strays.__file__, mark, str(pidfd)],
                env=dict(env),
                cwd="/",
                stdin=subprocess.PIPE,  # we hold the other end, and say nothing
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[pidfd],
                start_new_session=True,
            )
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """There is nothing left to watch over."""
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
