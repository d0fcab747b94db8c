"""What contributors are told is what there is: commands of make, and hooks that do what `make lint` does."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)


def test_every_make_command_on_a_page_is_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {target for page in pages for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE)}
    assert {"setup", "test", "docs"} <= named
    assert named <= set(TARGETS)


def test_the_hooks_do_what_make_lint_does() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    checks = [line.strip().removeprefix("$(BIN)/").removesuffix(" .") for line in recipe[1].splitlines()]
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in repositories[0]["hooks"]] == checks
