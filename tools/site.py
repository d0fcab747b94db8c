"""Hooks of mkdocs: the parts of the documentation site from outside of docs/, which are root pages, examples, the mark.

Links on a page lead to files of the repository, so that they work wherever the repository is read. Here they are turned
into links of the site.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = "docs"
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
TESTKUBE = "packages/basilica-testkube/README.md"
MARK = "src/basilica/server/console/mark.svg"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def published() -> dict[str, str]:
    """Files of the repository that are published from outside of docs/, with their places on the site."""
    pages = {name: name for name in ROOT_PAGES}
    examples = {
        f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))
    }
    return {
        **pages,
        **examples,
        TESTKUBE: "how-to/testkube.md",
        "examples": "examples/index.md",
        "LICENSE": "LICENSE.txt",
        MARK: "images/mark.svg",
    }


def place_of(repository_path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if repository_path.startswith(f"{DOCS}/"):
        return repository_path.removeprefix(f"{DOCS}/")
    return "index.md" if repository_path == "README.md" else published().get(repository_path)


def source_of(place: str) -> str:
    """The file of the repository that a page of the site is made from."""
    return next((source for source, at in published().items() if at == place), f"{DOCS}/{place}")


def site_link(page: str, link: str) -> str:
    """The site's form of a link in the repository. One that leads to nothing on the site stays as it is."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), link))
    place = place_of(target)
    return link if place is None else posixpath.relpath(place, posixpath.dirname(page) or ".")


def with_site_links(page: str, text: str) -> str:
    return LINK.sub(lambda found: site_link(page, found[1]), text)


def contents() -> dict[str, str]:
    """The texts of what is published from outside of docs/, by place."""
    texts: dict[str, str] = {}
    rows = []
    for source, place in published().items():
        path = ROOT / source
        if source.startswith("examples/"):
            code = path.read_text()
            first = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
            texts[place] = f"# `{source}`\n\n```python\n{code}```\n"
            rows.append(f"| [{path.name}]({source}) | {first} |")
        elif path.is_file():
            texts[place] = path.read_text()
    about = "Each one runs as it stands, on this machine: `python examples/hello_gang.py`."
    texts["examples/index.md"] = "\n".join(["# Examples", "", about, "", "| example | shows |", "|---|---|", *rows, ""])
    return texts


# ---- hooks -----------------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # noqa: PLC0415  only a build of the site has it

    for place, text in contents().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return with_site_links(page.file.src_uri, markdown)
