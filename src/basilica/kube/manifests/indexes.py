"""Completion indexes of a Job's status: run-length compressed, `1,3-5,7`."""

import re
import warnings

_TOKEN = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_indexes(text: object) -> frozenset[int]:
    """Return the indexes that the text names; a value that is no text names none.

    A reversed range is read the right way round. A token that is no number is skipped with a warning.
    """
    if not isinstance(text, str):
        return frozenset()
    found: set[int] = set()
    for token in text.split(","):
        if not token.strip():
            continue
        parts = _TOKEN.fullmatch(token.strip())
        if parts is None:
            warnings.warn(f"{token.strip()!r} in the completion indexes {text!r} is no index", stacklevel=2)
            continue
        ends = int(parts[1]), int(parts[2] or parts[1])
        found.update(range(min(ends), max(ends) + 1))
    return frozenset(found)
