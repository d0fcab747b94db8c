"""Kubernetes quantities as clients write them: `500m`, `8`, `32Gi`."""

import re

from basilica.core.errors import ValidationError

_QUANTITY = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,9})?)(?P<unit>m|[kKMGTP]i?)?")
_UNITS = {"": 1.0, "m": 0.001} | {
    prefix + suffix: float(base**power)
    for power, prefix in enumerate("kMGTP", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_UNITS["K"], _UNITS["Ki"] = _UNITS["k"], _UNITS["ki"]


def parse_cpu(text: str, field: str) -> float:
    """Cores."""
    return _parse(text, field, "cores such as '8', '0.5' or '500m'")


def parse_memory(text: str, field: str) -> int:
    """Bytes."""
    return int(_parse(text, field, "bytes such as '32Gi', '512Mi' or '2G'"))


def _parse(text: str, field: str, expected: str) -> float:
    match = _QUANTITY.fullmatch(text.strip()) if text.isascii() else None
    if match is None:
        raise ValidationError(field, text, f"must be {expected}")
    return float(match["number"]) * _UNITS[match["unit"] or ""]
