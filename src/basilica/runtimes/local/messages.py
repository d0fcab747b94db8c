"""Messages on a pipe: 8 bytes of length, then JSON."""

from __future__ import annotations

import json
import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_message(fd: int) -> Any:
    """Return the next message, or None at end of file or for a message cut short by the sender's death."""
    head = read_exactly(fd, 8)
    body = None if head is None else read_exactly(fd, int.from_bytes(head, "big"))
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = os.read(fd, min(size, 1 << 20))
        except ConnectionResetError:  # the peer died with our answer unread
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_message(fd: int, message: object) -> None:
    body = json.dumps(message).encode()
    data = memoryview(len(body).to_bytes(8, "big") + body)
    with suppress(BrokenPipeError):  # the control plane is gone; the next read returns None
        while data:
            data = data[os.write(fd, data) :]
