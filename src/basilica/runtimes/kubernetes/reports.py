"""The last report of a rank, as its entrypoint passes it on. Pure."""

import json

from basilica.core.reports import Report


def parse_report(text: str) -> Report | None:
    """None for what is no report."""
    try:
        found = json.loads(text)
        step, usual = found.get("step"), found.get("step_seconds")
        return Report(
            at=float(found["at"]),
            step=None if step is None else int(step),
            step_seconds=None if usual is None else float(usual),
            values={str(name): float(value) for name, value in found["values"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
