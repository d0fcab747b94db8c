"""The documentation site holds together: every page is in its navigation, and every link leads to a page of it.

`make docs` builds it, strictly; these tests need nothing but the sources.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import site

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def places() -> dict[str, str | None]:
    """Every file of the site, with its text where it is a page."""
    of_docs = [p for p in (ROOT / "docs").rglob("*") if p.is_file()]
    texts = {str(p.relative_to(ROOT / "docs")): p.read_text() if p.suffix == ".md" else None for p in of_docs}
    return dict(sorted({**texts, **site.contents()}.items()))


PLACES = places()
PAGES = {place: text for place, text in PLACES.items() if text is not None and place.endswith(".md")}


def in_navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from in_navigation(below)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(in_navigation(CONFIG["nav"])) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_of_the_site(page: str) -> None:
    text = re.sub(r"```.*?```", "", site.with_site_links(page, PAGES[page] or ""), flags=re.DOTALL)
    targets = [posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in site.LINK.findall(text)]
    assert [target for target in targets if target not in PLACES] == []


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("how-to/diloco.md", "../../examples/diloco_demo.py", "../examples/diloco_demo.md"),
        ("stability.md", "../CHANGELOG.md", "CHANGELOG.md"),
        ("CONTRIBUTING.md", "docs/adr/README.md", "adr/README.md"),
        ("index.md", "../README.md", "index.md"),
        ("how-to/console.md", "../images/console-run.png", "../images/console-run.png"),
        ("quickstart.md", "../pyproject.toml", "../pyproject.toml"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page: str, link: str, expected: str) -> None:
    assert site.site_link(page, link) == expected


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    assert CONFIG["strict"] is True
    assert not {"extra_javascript", "extra_templates"} & set(CONFIG)
    assert all(not sheet.startswith("http") for sheet in CONFIG["extra_css"])
    assert "url(" not in (ROOT / "docs/stylesheets/site.css").read_text()


def test_the_figures_of_the_landing_page_are_those_of_the_readme() -> None:
    def figures(text: str) -> str:
        return text.partition("| measured | figure | beside |")[2].partition("\n\n")[0]

    of_readme = figures((ROOT / "README.md").read_text())
    assert of_readme.count("\n") > 5
    assert figures(PAGES["index.md"] or "") == of_readme
