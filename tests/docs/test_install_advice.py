"""Advice on what to install names our own distributions, or packages that the project knows; never a stranger's.

`basilica` on PyPI is another project's package, so `pip install basilica` would run code that nobody here has read.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from basilica.version import DISTRIBUTION, pip_install
from tests.docs.test_words import literals

ROOT = Path(__file__).parents[2]
PROJECTS = [
    tomllib.loads(p.read_text())["project"] for p in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]
]
PLACES = ("src", "docs", "examples", "deploy", "tools", "benchmarks", "packages", ".ci", ".github")
KINDS = (".py", ".js", ".html", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".json")
COMMAND = re.compile(r"\b(?:pip3?|pipx|uv tool) install\b|\buv add\b")
WORD = re.compile(r"""[^\S\n]+(?:'([^'\n]*)'|"([^"\n]*)"|([^\s'"`,;&|#)<>]+))""")
WITH_VALUE = (
    "-c",
    "-r",
    "-t",
    "-d",
    "-i",
    "--target",
    "--constraint",
    "--requirement",
    "--index-url",
    "--extra-index-url",
)
EXTRA = re.compile(r"(?<![\w./-])basilica\[\w")


def files() -> list[Path]:
    below = [
        p
        for place in PLACES
        for p in (ROOT / place).rglob("*")
        if p.suffix in KINDS or p.name.startswith("Containerfile")
    ]
    return [*below, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob(".*.yaml")]


def texts(path: Path) -> Iterator[str]:
    """The strings of a module, without what is put into them at run time; any other file as it is."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from (found for _, found in literals(text))
    else:
        yield text.replace("\\\n", " ")


def requirements(text: str) -> Iterator[str]:
    """What each command in the text would install: `name[extras]`, without the version, or a path."""
    for command in COMMAND.finditer(text):
        at, value_of = command.end(), ""
        while word := WORD.match(text, at):
            at = word.end()
            found = next(group for group in word.groups() if group is not None)
            if not value_of and not found.startswith("-") and found != "\\":
                yield re.split(r"[=<>!~; ]", found)[0]
            value_of = found if found in WITH_VALUE else ""


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement.partition("[")[0]).lower()


def ours() -> dict[str, set[str]]:
    return {project["name"]: set(project.get("optional-dependencies", {})) for project in PROJECTS}


def known() -> set[str]:
    """The packages of others: those that the project is tested with, and the published client."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    return {name_of(line.partition("==")[0]) for line in pinned if line[:1].isalpha()} | {"basilica-sdk"}


def problem(requirement: str) -> str | None:
    if requirement.startswith((".", "/", "$(")):
        return None
    name, extras = name_of(requirement), set(re.findall(r"[\w-]+", requirement.partition("[")[2]))
    if name in ours():
        return f"{name} has no extra {sorted(extras - ours()[name])}" if extras - ours()[name] else None
    return None if name in known() else f"{name!r} is not known here"


def test_advice_names_packages_of_ours_or_known_ones() -> None:
    found = [(path, text) for path in files() for text in texts(path)]
    wrong = [
        f"{path.relative_to(ROOT)}: pip install {asked}: {problem(asked)}"
        for path, text in found
        for asked in requirements(text)
        if problem(asked)
    ]
    wrong += [f"{path.relative_to(ROOT)}: basilica[…]" for path, text in found if EXTRA.search(text)]
    assert wrong == []


def test_advice_in_messages_names_an_extra_that_there_is() -> None:
    asked = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"""\bpip_install\(["']([\w-]+)["']\)""", path.read_text())
    }
    assert {"diloco", "kubernetes"} <= asked
    assert asked <= ours()[DISTRIBUTION]
    assert pip_install("diloco") == "pip install 'basilica-train[diloco]'"


@pytest.mark.parametrize(
    "advice",
    [
        "RUN pip install --no-cache-dir /src basilica",
        "(`pip install 'basilica[diloco]'`)",
        "uv add basilica",
        "pip install -c constraints.txt basilica==0.1.0",
        "pip install basilica-train[diloca]",
        "pip install numpyy",
    ],
)
def test_wrong_advice_is_found(advice: str) -> None:
    assert [asked for asked in requirements(advice) if problem(asked)]


def test_good_advice_passes() -> None:
    advice = "pip install torch 'basilica-train[diloco,plot]>=0.1' && 'pip install basilica-sdk', or pip install -e ."
    assert list(requirements(advice)) == ["torch", "basilica-train[diloco,plot]", "basilica-sdk", "."]
    assert not [asked for asked in requirements(advice) if problem(asked)]
