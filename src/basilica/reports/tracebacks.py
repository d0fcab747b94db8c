"""The traceback of a rank's Python exception, read from the file that torch calls TORCHELASTIC_ERROR_FILE.

The rank writes that file, so it may contain anything: unknown content counts as no traceback.
"""

import json

from basilica.machine import files

FILE_BYTES_MAX = 1 << 20
TRACEBACK_CHARS_MAX = 16_000


def read_traceback(path: str) -> str:
    """Return the traceback, its last part if it is long; empty if there is none."""
    try:
        return _text_of(json.loads(files.read(path, FILE_BYTES_MAX)))[-TRACEBACK_CHARS_MAX:]
    except (OSError, ValueError, RecursionError):
        return ""


def _text_of(found: object) -> str:
    """Return the traceback that torch writes beside its message; without one, the message."""
    message = found.get("message") if isinstance(found, dict) else None
    more = message.get("extraInfo") if isinstance(message, dict) else None
    candidates = [more.get("py_callstack") if isinstance(more, dict) else None]
    candidates += [message.get("message") if isinstance(message, dict) else message]
    text = next((each for each in candidates if isinstance(each, str) and each.strip()), "")
    return text.encode("utf-8", "replace").decode().strip("\n")  # half a surrogate pair could not be stored
