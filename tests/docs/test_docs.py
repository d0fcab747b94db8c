"""The documentation is kept honest: what is generated is current, what can be run is run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_reference_is_what_the_code_says() -> None:
    stale = [path.name for path, text in reference.pages().items() if path.read_text() != text]
    assert not stale, f"run 'make verify' and commit {stale}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/how-to/run-a-server.md").read_text()
    source = (ROOT / "src/basilica/server/metrics.py").read_text()
    for name in re.findall(r'"(basilica_\w+)"', source):
        assert name in page, name


@pytest.mark.slow
def test_the_quickstart_runs_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL)
    commands = blocks[1].replace("~/.local/state/basilica", str(tmp_path)).replace("sleep 1", "sleep 0.3")
    argv = [sys.executable, "-m", "basilica.cli.main", "serve", "--port", "0", "--state-dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            script = "set -e\nshopt -s expand_aliases\n" + commands.replace("http://127.0.0.1:7411", url)
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        finally:
            server.terminate()
    assert "2| rank 2 step 9" in done.stdout  # the rank that joined
    assert '"phase":"succeeded"' in done.stdout
    assert '"state":"Deleted"' in done.stdout


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    argv = [sys.executable, str(ROOT / "examples/gang.py"), "--picture", str(picture)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
    assert "rank 2 exited with code 1" in done.stdout
    assert "5 of 5 ranks exited 0" in done.stdout
    assert picture.read_text().startswith("<svg")
