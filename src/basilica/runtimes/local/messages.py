"""Messages on a pipe: 8 bytes of length, then JSON."""

from __future__ import annotations

import json
import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_message(fd: int) -> Any:
    """The next message, or None at end of file; a message cut short by the sender's death is none."""
    head = read_exactly(fd, 8)
    body = None if head is None else read_exactly(fd, int.from_bytes(head, "big"))
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = os.read(fd, min(size, 1 << 20))
        except ConnectionResetError:  # it died with an answer of ours unread
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_message(fd: int, message: object) -> None:
    body = json.dumps(message).encode()
    data = memoryview(len(body).to_bytes(8, "big") + body)
    with suppress(BrokenPipeError):  # the control plane is gone; the next read says so
        while data:
            data = data[os.write(fd, data) :]
