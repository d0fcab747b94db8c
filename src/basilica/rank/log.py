"""Lines of the entrypoint in the rank's log, marked as ours: the rest of that log is the rank's."""

import sys


def log(text: str) -> None:
    print(f"basilica: {text}", file=sys.stderr, flush=True)
