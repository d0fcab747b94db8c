"""For everybody: axe finds no serious fault on any page, in light and dark; nothing scrolls sideways on a phone."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console import scenes
from tests.console.stage import PHONE, Stage, looking

AXE = (Path(find_spec("axe_playwright_python").origin or "").parent / "axe.min.js").read_text()  # type: ignore[union-attr]
GRAVE = ("serious", "critical")
OF_COLOURS = ["color-contrast", "link-in-text-block"]  # all rules of axe's that are on, and have the tag cat.color
PAGES = {
    "overview": ("#/", ".rows .run-row"),
    "run": ("#/run/llama-8b", ".curve"),
    "failed": ("#/run/mistral-ft", ".card.bad"),
    "failed worker": ("#/run/gemma-ft", ".card.bad"),
    "workers": ("#/run/gemma-2b", ".incident-card pre"),
    "stalled": ("#/run/vit-sweep", ".card.warn"),
    "waiting": ("#/run/queued", ".timeline .band"),
    "many ranks": ("#/run/wide", ".grid[data-size=small]"),
    "rounds": ("#/run/diloco-1b", ".replica"),
    "many replicas": ("#/run/diloco-64", ".replica"),
    "logs": ("#/run/llama-8b/logs", ".line"),
}


@pytest.fixture(scope="module", autouse=True)
def _runs(stage: Stage) -> None:
    scenes.failed(stage)
    scenes.failed_worker(stage)
    scenes.torchrun(stage, crashes=5)
    scenes.stalled(stage)
    scenes.rounds(stage)
    scenes.rounds(stage, "diloco-64", replicas=64, count=60)
    stage.deploy("wide", target=300)
    stage.actors.queue = "waits for 8 GPUs, behind llama"
    stage.deploy("queued", target=2)
    stage.actors.queue = ""
    instance = scenes.training(stage)
    stage.do(stage.actors.write(instance, 0, "a line", "RuntimeError: a bad one", "x" * 500))


def faults(page: Page, scheme: str) -> list[Any]:
    """Serious faults; in the dark those that colours make, since all else is the same as in the light."""
    page.evaluate(AXE)  # beside the page's own scripts, which its policy would not allow
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if scheme == "dark":
        options["runOnly"] = {"type": "rule", "values": OF_COLOURS}
    found = page.evaluate("options => axe.run(document, options)", options)
    return [
        (fault["id"], fault["impact"], [node["html"][:200] for node in fault["nodes"]][:3])
        for fault in found["violations"]
        if fault["impact"] in GRAVE
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(browser: Browser, stage: Stage, name: str, scheme: Any) -> None:
    where, ready = PAGES[name]
    with looking(browser, stage.login_link(), color_scheme=scheme) as page:
        page.goto(f"{stage.url}/{where}")
        expect(page.locator(ready).first).to_be_visible()
        assert faults(page, scheme) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_what_soon_passes(browser: Browser, stage: Stage, scheme: Any) -> None:
    """A crash loop and a planned change, made here: neither lasts as long as the tests of this module."""
    with looking(browser, stage.login_link(), color_scheme=scheme) as page:
        page.goto(f"{stage.url}/#/run/{scenes.torchrun(stage, f'looping-{scheme}', crashes=5)}")
        expect(page.locator(".crashes li")).to_be_visible()
        page.get_by_role("listbox", name="Ranks").get_by_role("option").nth(2).hover()
        assert faults(page, scheme) == []
        page.goto(f"{stage.url}/#/run/{scenes.planned(stage, f'resizing-{scheme}')}")
        expect(page.locator(".notice")).to_be_visible()
        assert faults(page, scheme) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_dialogs_without_a_connection_runs_or_a_login(
    browser: Browser, stage: Stage, scheme: Any
) -> None:
    with looking(browser, stage.login_link(), color_scheme=scheme) as page:
        page.goto(f"{stage.url}/#/run/llama-8b")
        page.get_by_role("button", name="Delete…").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert faults(page, scheme) == []
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        assert faults(page, scheme) == []
        page.route("**/watch*", lambda route: route.abort())
        page.goto(f"{stage.url}/#/")
        expect(page.locator("#lost")).to_be_visible()
        assert faults(page, scheme) == []
    with looking(browser, stage.login_link("bob"), color_scheme=scheme) as page:
        expect(page.locator(".nothing")).to_contain_text("No runs yet")
        assert faults(page, scheme) == []
    with looking(browser, stage.url, color_scheme=scheme) as page:
        expect(page.get_by_role("heading", name="Not logged in")).to_be_visible()
        assert faults(page, scheme) == []


@pytest.mark.parametrize("name", PAGES)
def test_nothing_scrolls_sideways_on_a_phone(browser: Browser, stage: Stage, name: str) -> None:
    where, ready = PAGES[name]
    with looking(browser, stage.login_link(), viewport=PHONE, is_mobile=True, has_touch=True) as page:
        page.goto(f"{stage.url}/{where}")
        expect(page.locator(ready).first).to_be_visible()
        widths = page.evaluate(
            "[document.documentElement.scrollWidth, document.getElementById('main').scrollWidth, innerWidth]"
        )
        assert max(widths) == PHONE["width"]
        assert page.locator("#link-state").get_attribute("data-state") in ("live", "ended")


def test_a_change_of_phase_is_said_to_screen_readers_and_reports_are_not(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("spoken", target=2, min=2, max=2)
    with looking(browser, f"{stage.login_link()}#/run/spoken") as page:
        expect(page.locator(".run-head .phase")).to_contain_text("ready")
        said = page.locator("#said")
        stage.call(stage.actors.report, instance, 0, 1, loss=1.0)
        expect(page.locator(".dot")).to_be_visible()
        expect(said).to_have_text("")
        stage.call(stage.actors.exit, instance, 0, 1)
        expect(said).to_have_text("spoken is failed")
