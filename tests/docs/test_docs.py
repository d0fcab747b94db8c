"""The documentation is kept honest: what is generated is current, what can be run is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.registry import Collector

from basilica.client import embedded
from basilica.controller.loop import Controller
from basilica.controller.metrics import ControllerCollector
from basilica.machine.clocks import SteadyClock
from basilica.operator.metrics import OperatorMetrics
from basilica.server.metrics import Metrics
from basilica.stores.memory import MemoryStore
from basilica.testing.fake_runtime import FakeRuntime
from tests.support.server import run_request, serving
from tools import reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="annotations read differently in other Pythons")
def test_the_reference_is_what_the_code_says() -> None:
    stale = [path.name for path, text in reference.pages().items() if path.read_text() != text]
    assert not stale, f"run 'make verify' and commit {stale}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_metric_is_documented() -> None:
    controller = Controller(MemoryStore(), FakeRuntime(), SteadyClock())
    server = Metrics()
    server.add_controller(controller)
    operator = OperatorMetrics(lambda: controller, lambda: True)
    named = {
        page: set(re.findall(r"`(basilica_\w+)[`{]", (ROOT / "docs/how-to" / page).read_text()))
        for page in ("run-a-server.md", "install-on-kubernetes.md")
    }
    assert named["run-a-server.md"] == _scraped(server.registry)
    assert named["install-on-kubernetes.md"] == _scraped(operator) - _scraped(ControllerCollector(controller))


def _scraped(collector: Collector) -> set[str]:
    """Names as Prometheus has them: what only counts up ends in `_total`."""
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in collector.collect()}


QUICKSTART = (ROOT / "docs/quickstart.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", QUICKSTART, re.DOTALL)


def _bash(script: str, **env: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"set -e\nshopt -s expand_aliases\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PATH": path, **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_quickstart_runs_as_written_with_curl_and_against_a_server(tmp_path: Path) -> None:
    _, _, against, curl = _blocks("bash")
    with serving(tmp_path) as server:
        here = {"~/.local/state/basilica": str(tmp_path), "http://127.0.0.1:7411": server.url, "sleep 1": "sleep 0.3"}
        for old, new in here.items():
            against, curl = against.replace(old, new), curl.replace(old, new)
        with server.client() as client:
            client.post("/deployments", json=run_request("seen", "true")).raise_for_status()
        assert "seen" in _bash(re.sub(r"^basilica serve.*$", "", against, flags=re.MULTILINE))
        said = _bash(curl)
    assert "2| rank 2 step 9" in said  # the rank that joined
    assert '"phase":"succeeded"' in said
    assert '"state":"Deleted"' in said


def test_the_quickstart_runs_as_written_from_python_and_a_terminal(tmp_path: Path) -> None:
    env = {"BASILICA_STATE_DIR": str(tmp_path), "BASILICA_IDLE_EXIT": "60"}
    script = tmp_path / "quickstart.py"
    script.write_text(_blocks("python")[0])
    try:
        said = _bash(f"{sys.executable} {script}", **env)
        assert "ranks are up" in said
        assert said.rstrip().endswith("{0: 0.5, 1: 0.5, 2: 0.5}")
        said = _bash(_blocks("bash")[1], **env)
        assert "2| step 9" in said
    finally:
        embedded.shutdown(tmp_path, cancel_runs=True)


def test_the_demo_runs(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    argv = [sys.executable, str(ROOT / "examples/gang.py"), "--picture", str(picture)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
    assert "rank 2 exited with code 1" in done.stdout
    assert "5 of 5 ranks exited 0" in done.stdout
    assert picture.read_text().startswith("<svg")
