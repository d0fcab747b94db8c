"""Exit codes of the commands that wait for a run; docs/reference/exit-codes.md documents them."""

import signal

from basilica.client.views import RunView

FAILED = 1
TIMED_OUT = 124
DETACHED = 125
CANCELLED = 130


def exit_code(view: RunView) -> int:
    """Return the exit code for an ended run: 0, the culprit's own code, or 130."""
    match view.phase:
        case "succeeded":
            return 0
        case "cancelled":
            return CANCELLED
        case _:
            return _culprit_code(view)


def _culprit_code(view: RunView) -> int:
    if view.culprit is None:
        return FAILED
    if 1 <= view.culprit.exit_code <= 255:
        return view.culprit.exit_code
    name = next((e.signal for e in view.exits if e.rank == view.culprit.rank), None)
    return 128 + signal.Signals[name] if name is not None and name in signal.Signals.__members__ else FAILED
