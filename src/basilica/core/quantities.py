"""Kubernetes quantities as people write them (`500m`, `8`, `32Gi`), read and written."""

import re

from basilica.core.errors import ValidationError

_QUANTITY = re.compile(r"(?P<number>[0-9]{1,19}(?:\.[0-9]{1,9})?)(?P<unit>m|[kKMGTPE]i?)?")
_UNITS: dict[str, int] = {"": 1, "k": 1000, "K": 1000, "ki": 1024, "Ki": 1024} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("MGTPE", start=2)
    for suffix, base in (("", 1000), ("i", 1024))
}
_BINARY = ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki")


def parse_cpu(text: str, field: str) -> float:
    """Cores."""
    return float(_parse(text, field, "cores such as '8', '0.5' or '500m'"))


def parse_memory(text: str, field: str) -> int:
    """Bytes."""
    return int(_parse(text, field, "bytes such as '32Gi', '512Mi' or '2G'"))


def format_cpu(cores: float) -> str:
    """The shortest text that reads back as the same number."""
    thousandths = round(cores * 1000)
    for text in (str(thousandths // 1000) if thousandths % 1000 == 0 else "", f"{thousandths}m"):
        if text and parse_cpu(text, "cpu") == cores:
            return text
    return f"{cores:.9f}"


def format_memory(size: int) -> str:
    unit = next((unit for unit in _BINARY if size and size % _UNITS[unit] == 0), "")
    return f"{size // _UNITS[unit]}{unit}"


def _parse(text: str, field: str, expected: str) -> float:
    match = _QUANTITY.fullmatch(text.strip()) if text.isascii() else None
    if match is None:
        raise ValidationError(field, text, f"must be {expected}")
    number, unit = match["number"], match["unit"] or ""
    if unit == "m":
        return float(number) * 0.001
    return (float(number) if "." in number else int(number)) * _UNITS[unit]
