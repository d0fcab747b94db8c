"""The termination message of a rank's container: the record of its last attempt, for readers without the keyspace."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from basilica.core import environment as env
from basilica.machine.proc import SAFELY
from basilica.rendezvous.orders import AttemptRecord

TERMINATION_LOG = "/dev/termination-log"
MESSAGE_BYTES_MAX = 2000  # a message is cut at 4096 bytes, and some runtimes keep half of it


def write_termination_message(environment: Mapping[str, str], attempt: int, record: AttemptRecord) -> None:
    """Write the record of an attempt that has ended, without the oldest lines of its log until it fits."""
    assert record.ended is not None
    ended = replace(record.ended, traceback="")
    while True:
        text = f'{{"basilica": {attempt}, "record": {replace(record, ended=ended).dump()}}}'
        if len(text.encode()) <= MESSAGE_BYTES_MAX or not ended.log_tail:
            break
        ended = replace(ended, log_tail=ended.log_tail[1:])
    with contextlib.suppress(OSError):
        path = environment.get(env.TERMINATION_LOG, TERMINATION_LOG)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | SAFELY, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
