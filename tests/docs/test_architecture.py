"""The page for those who carry on: every name in it exists, and every room of the house is in its floor plan."""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "basilica"
PAGE = (ROOT / "docs/architecture.md").read_text()
ROOMS = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__"}
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
NAMES = sorted({name for name in CODE if re.fullmatch(r"\w+(\.\w+)+", name) and name.partition(".")[0] in ROOMS})
PLACES = sorted({name for name in CODE if re.fullmatch(r"[\w/]+(/|\.py)", name)})


def resolved(name: str) -> Any:
    """The module, class or function of that name; its modules are imported as far as they go."""
    parts = f"basilica.{name}".split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(".py")])
def test_every_name_is_in_the_code(name: str) -> None:
    assert resolved(name) is not None


def test_every_place_is_in_the_source() -> None:
    assert len(PLACES) > 30
    named = [place for place in PLACES if place not in ("runtimes/NAME/", "executors/NAME.py")]
    assert [p for p in named if not (SOURCE / p).exists() and not (ROOT / p).exists()] == []


def test_the_floor_plan_is_that_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["name"] == "the floor plan")
    floors = [{room.strip() for room in layer.split("|")} for layer in layers]
    rows = re.findall(r"^\| ([^|]*) \| `(\w+)(?:/|\.py)` \|", PAGE.replace("| |", "|  |"), re.MULTILINE)
    shown: list[set[str]] = []
    for floor, room in rows:
        if floor.strip():
            shown.append(set())
        shown[-1].add(room)
    assert shown == floors


def test_a_name_that_is_not_there_is_found() -> None:
    assert "core.reconcile.reconcile" in NAMES
    with pytest.raises(AttributeError):
        resolved("core.reconcile.decide")
