"""Completion indexes as a Job's status writes them: `1,3-5,7`."""

from collections.abc import Iterable


def parse(text: str, below: int) -> set[int]:
    """The indexes under `below`; those above are forgotten, as the Job controller forgets them."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found |= set(range(int(first), min(int(last or first), below - 1) + 1))
    return found


def written(indexes: Iterable[int]) -> str:
    """Runs of three and more are written with their ends, as `3-5`; two neighbours as `3,4`."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    parts = []
    for first, last in runs:
        joint = "," if last == first + 1 else "-"
        parts.append(str(first) if first == last else f"{first}{joint}{last}")
    return ",".join(parts)
