"""The bounds of a number in a query."""

_LARGEST_INTEGER = (1 << 63) - 1


def bounded(number: int | None) -> int:
    """Clamp a number to SQLite's range; None means no bound."""
    return _LARGEST_INTEGER if number is None else max(0, min(number, _LARGEST_INTEGER))
