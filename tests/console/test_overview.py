"""The overview: what is running, found, narrowed and sorted; live."""

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console import scenes
from tests.console.stage import Stage, looking


@pytest.fixture(scope="module", autouse=True)
def _runs(stage: Stage) -> None:
    scenes.failed(stage, "broken")
    stage.deploy("small", target=1)
    stage.deploy("large", target=6)
    stage.deploy("his", user="bob")


def names(page: Page) -> list[str]:
    return page.locator(".rows .run-name").all_inner_texts()


def test_each_run_is_a_row_with_phase_world_and_last_event(page: Page) -> None:
    large = page.locator(".rows .run-row", has=page.get_by_role("link", name="large", exact=True))
    expect(large).to_contain_text("ready")
    expect(large.get_by_role("img")).to_have_attribute("aria-label", "6 of 6 ranks up, between 1 and 8")
    expect(large).to_contain_text("WorldReady")
    expect(large.locator(".c-age")).to_contain_text("s")
    broken = page.locator(".rows .run-row", has=page.get_by_role("link", name="broken", exact=True))
    expect(broken).to_contain_text("failed")
    expect(broken).to_contain_text("rank 3 exited with code 1")


def test_another_users_runs_are_not_there(page: Page, stage: Stage) -> None:
    expect(page.get_by_role("link", name="large", exact=True)).to_be_visible()
    assert "his" not in names(page)
    stage.deploy("his-second", user="bob")
    stage.deploy("hers-after-it")
    expect(page.get_by_role("link", name="hers-after-it", exact=True)).to_be_visible()
    assert not [name for name in names(page) if name.startswith("his")]


def test_search_filter_and_sort(page: Page) -> None:
    search = page.get_by_role("searchbox", name="Search runs")
    search.fill("code 1")
    expect(page.locator(".rows .run-name")).to_have_text(["broken"])
    search.fill("nothing like it")
    expect(page.locator(".nothing")).to_contain_text("None of the")
    search.fill("")
    page.get_by_role("button", name="Failed").click()
    expect(page.locator(".rows .run-name")).to_have_text(["broken"])
    page.get_by_role("button", name="All").click()
    page.get_by_role("button", name="World").click()
    expect(page.get_by_role("columnheader", name="World")).to_have_attribute("aria-sort", "descending")
    expect(page.locator(".rows .run-name").first).to_have_text("large")
    page.get_by_role("button", name="Name").click()
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", "ascending")
    assert names(page) == sorted(names(page))


def test_trouble_is_what_failed_shrank_or_has_stalled(page: Page, stage: Stage) -> None:
    instance = scenes.stalled(stage, "silent")
    page.get_by_role("button", name="Trouble").click()
    try:
        expect(page.locator(".rows .run-name")).to_have_text(["silent", "broken"])
        expect(page.locator(".rows .run-row").first).to_contain_text("! 1 stalled")
        stage.call(stage.actors.stall, instance, 2, None)
        expect(page.locator(".rows .run-name")).to_have_text(["broken"])
    finally:
        stage.do(stage.world.plane.delete("ann", instance))


def test_what_changes_is_seen_without_asking(page: Page, stage: Stage) -> None:
    expect(page.locator("#link-state")).to_have_text("Live")
    instance = stage.deploy("fleeting", target=3)
    link = page.get_by_role("link", name="fleeting", exact=True)
    expect(link).to_be_visible()
    stage.do(stage.world.end(instance, 0, 0, 0))
    expect(page.locator(".rows .run-row", has=link)).to_contain_text("succeeded")
    stage.do(stage.world.plane.delete("ann", instance))
    expect(link).to_have_count(0)


def test_with_the_keyboard_alone(page: Page) -> None:
    expect(page.locator(".rows .run-name").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("large")
    expect(page.locator(".rows .run-name")).to_have_text(["large"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="large", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("large")
    page.keyboard.press("l")
    expect(page.get_by_role("region", name="Log")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("all runs")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_focus_stays_when_rows_move(page: Page, stage: Stage) -> None:
    link = page.get_by_role("link", name="small", exact=True)
    link.focus()
    stage.deploy("newest-of-all")
    expect(page.get_by_role("link", name="newest-of-all", exact=True)).to_be_visible()
    expect(link).to_be_focused()


def test_the_theme_can_be_chosen_and_stays(page: Page, stage: Stage) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="change to dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    expect(page.get_by_role("button", name="change to light")).to_be_visible()


def test_the_focus_stays_on_a_row_that_has_moved_out_of_sight(page: Page, stage: Stage) -> None:
    for n in range(60):
        stage.deploy(f"row-{n:02}", target=1)
    page.get_by_role("searchbox").fill("row-")
    link = page.get_by_role("link", name="row-30", exact=True)
    expect(page.locator(".choices button").first).to_contain_text("6")
    page.get_by_role("button", name="Name").click()
    page.locator("#main").evaluate("main => main.scrollTop = 41 * 20")
    link.focus()
    page.locator("#main").evaluate("main => main.scrollTop = main.scrollHeight")
    expect(page.get_by_role("link", name="row-59", exact=True)).to_be_in_viewport()
    expect(link).to_be_focused()
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="row-31", exact=True)).to_be_focused()
    expect(page.get_by_role("link", name="row-31", exact=True)).to_be_in_viewport()
    stage.do(stage.world.plane.delete("ann", "row-31"))
    expect(page.get_by_role("link", name="row-32", exact=True)).to_be_focused()  # what is there now


def test_runs_that_are_alike_keep_their_places(page: Page, stage: Stage) -> None:
    made = [stage.deploy(f"alike-{n}", target=1) for n in range(4)]
    page.get_by_role("searchbox").fill("alike-")
    page.get_by_role("button", name="Phase").click()
    expect(page.locator(".rows .run-name")).to_have_text(["alike-3", "alike-2", "alike-1", "alike-0"])
    stage.do(stage.world.plane.scale("ann", made[1], 2))
    row = page.locator(".rows .run-row", has=page.get_by_role("link", name="alike-1", exact=True))
    expect(row.get_by_role("img")).to_have_attribute("aria-label", "2 of 2 ranks up, between 1 and 8")
    expect(page.locator(".rows .run-name")).to_have_text(["alike-3", "alike-2", "alike-1", "alike-0"])


def test_gpu_hours_and_ages_go_on_while_nothing_else_happens(browser: Browser, stage: Stage) -> None:
    stage.actors.gpus = 8
    try:
        instance = stage.deploy("steady", target=2)
    finally:
        stage.actors.gpus = 0
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(stage.login_link())
        row = page.locator(".rows .run-row", has=page.get_by_role("link", name="steady", exact=True))
        expect(row.locator(".c-gpu")).to_have_text("<0.1")
        page.clock.fast_forward("02:00:00")
        expect(row.locator(".c-gpu")).to_have_text("32.0")
        expect(row.locator(".c-age")).to_have_text("2h00m")
        expect(row.locator(".when")).to_have_text("2h ago")
        page.goto(f"{stage.url}/#/run/{instance}")
        expect(page.locator(".facts")).to_contain_text("GPU-hours32.0")
