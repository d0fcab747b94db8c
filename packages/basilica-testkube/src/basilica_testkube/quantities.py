"""Quantities: `500m`, `16Gi`, `4`."""

_SUFFIXES = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def amount(quantity: str | float) -> float:
    """A quantity as a number."""
    if not isinstance(quantity, str):
        return float(quantity)
    number = quantity.rstrip("numkKMGTPEi")
    return float(number) * _SUFFIXES[quantity[len(number) :]]
