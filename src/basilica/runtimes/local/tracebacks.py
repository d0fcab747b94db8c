"""What a rank's program left of its Python exception, in the file that torch calls TORCHELASTIC_ERROR_FILE.

The rank writes that file, so anything may be in it: what is not understood is no traceback.
"""

import json
import os
import stat

FILE_BYTES_MAX = 1 << 20
TRACEBACK_CHARS_MAX = 16_000


def read_traceback(path: str) -> str:
    """The traceback, its last part if it is long; empty if there is none."""
    try:
        data = _read(path)
        return _text_of(json.loads(data))[-TRACEBACK_CHARS_MAX:] if len(data) <= FILE_BYTES_MAX else ""
    except (OSError, ValueError, RecursionError):
        return ""


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(FILE_BYTES_MAX + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _text_of(found: object) -> str:
    """Torch writes the traceback beside its message; where there is none, the message is what there is."""
    message = found.get("message") if isinstance(found, dict) else None
    more = message.get("extraInfo") if isinstance(message, dict) else None
    candidates = [more.get("py_callstack") if isinstance(more, dict) else None]
    candidates += [message.get("message") if isinstance(message, dict) else message]
    text = next((each for each in candidates if isinstance(each, str) and each.strip()), "")
    return text.encode("utf-8", "replace").decode().strip("\n")  # half a surrogate pair could not be stored
