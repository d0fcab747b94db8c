"""Words that claim what is not so, kept out of every sentence that a user may read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Reports are relayed, and that is so; traffic between hosts is not.
RELAY = re.compile(
    r"\b(over|via|through|takes?|uses?) (the|a) (hub )?relay|\b(traffic|hosts?)\b.*\brelay", re.IGNORECASE
)
WIRE_WORD = "hub-relay"  # a value of `transport`, which the API has in common with others


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Every string of a module, the parts of f-strings and docstrings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text()
    yield from literals(text) if path.suffix == ".py" else enumerate(text.splitlines(), 1)


def pages() -> list[Path]:
    sources = [ROOT / "src", *(ROOT / "packages").glob("*/src")]
    code = [p for source in sources for p in source.rglob("*") if p.suffix in (".py", ".js", ".html")]
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    return [*code, *texts, *(ROOT / "deploy").iterdir(), *(ROOT / "examples").glob("*.py")]


def test_nothing_claims_that_traffic_goes_over_a_relay() -> None:
    """There is none: what is known is who does not reach whom."""
    claims = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:100]}"
        for path in pages()
        for line, text in sentences(path)
        if RELAY.search(text.replace(WIRE_WORD, ""))
    ]
    assert claims == []


@pytest.mark.parametrize("claim", ['say(f"{x} goes over the Relay")', '"""Traffic is relayed."""'])
def test_a_claim_in_any_string_of_a_module_is_found(claim: str) -> None:
    assert any(RELAY.search(text) for _, text in literals(claim))
