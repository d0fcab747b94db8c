"""Live: what is told while nobody looks, and what happens to a page whose session ends."""

from playwright.sync_api import Browser, Page, expect

from tests.console.stage import Stage, looking
from tests.support.world import key_of

HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def watchers(stage: Stage) -> int:
    """How many follow the changes of all runs."""
    found: int = stage.call(lambda: len(stage.world.memory._bell._readers))
    return found


def test_a_page_that_nobody_looks_at_lets_the_server_rest(browser: Browser, stage: Stage) -> None:
    stage.deploy("before")
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(stage.login_link())
        expect(page.get_by_role("link", name="before", exact=True)).to_be_visible()
        watching = watchers(stage)
        page.evaluate(HIDE, True)
        page.clock.run_for(31_000)
        while watchers(stage) == watching:
            page.clock.run_for(100)
        stage.deploy("meanwhile")
        assert page.get_by_role("link", name="meanwhile", exact=True).count() == 0
        page.evaluate(HIDE, False)
        expect(page.get_by_role("link", name="meanwhile", exact=True)).to_be_visible()
        expect(page.locator("#lost")).to_be_hidden()


def test_a_session_that_ends_is_told_and_how_to_get_back(browser: Browser, stage: Stage) -> None:
    with looking(browser, stage.login_link("bob")) as page:
        expect(page.locator("#link-state")).to_have_text("Live")

        async def revoke() -> None:
            for key in await stage.world.keys.keys():
                if key.user == "bob":
                    await stage.world.keys.revoke_key(key.id)

        stage.do(revoke())
        page.goto(f"{stage.url}/#/run/any")
        expect(page.get_by_role("heading", level=1)).to_have_text("Not logged in")
        expect(page.locator("main pre")).to_have_text("basilica console")
        assert key_of("bob") not in page.content()


def test_two_tabs_of_one_login(page: Page, stage: Stage) -> None:
    instance = stage.deploy("shared", target=2)
    expect(page.get_by_role("link", name="shared", exact=True)).to_be_visible()
    other = page.context.new_page()
    other.goto(f"{stage.url}/#/run/{instance}")
    expect(other.locator(".run-head .phase")).to_contain_text("ready")
    other.locator("#target").fill("3")
    other.get_by_role("button", name="Scale", exact=True).click()
    row = page.locator(".rows .run-row", has=page.get_by_role("link", name="shared", exact=True))
    expect(row.get_by_role("img")).to_have_attribute("aria-label", "3 of 3 ranks up, between 1 and 8")


def test_the_keys_can_be_turned_off(page: Page) -> None:
    expect(page.locator("#link-state")).to_have_text("Live")
    page.keyboard.press("?")
    page.get_by_label("Use single keys").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).not_to_be_focused()
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("Use single keys").check()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
