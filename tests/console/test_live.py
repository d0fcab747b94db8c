"""Live: what is told while nobody looks, and what happens to a page whose session ends."""

import asyncio
import re
from contextlib import suppress

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from basilica.core.errors import DeploymentNotFound
from basilica.server import streams
from tests.console.relay import relaying
from tests.console.stage import Stage, looking
from tests.support.world import key_of

HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


NOTE_STATES = """() => {
  const state = document.getElementById('link-state');
  window.states = [state.dataset.state];
  new MutationObserver(() => window.states.push(state.dataset.state)).observe(state, { attributes: true });
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


def test_a_page_that_is_opened_behind_another_lets_the_server_rest(browser: Browser, stage: Stage) -> None:
    stage.deploy("behind")
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.add_init_script(f"({HIDE})(true)")
        page.goto(stage.login_link())
        expect(page.get_by_role("link", name="behind", exact=True)).to_be_attached()
        watching = watchers(stage)
        page.clock.run_for(31_000)
        for _ in range(100):
            if watchers(stage) < watching:
                break
            page.clock.run_for(100)
        assert watchers(stage) < watching
        page.evaluate(HIDE, False)
        expect(page.locator("#link-state")).to_have_text("Live")


def test_a_page_that_is_hidden_while_the_connection_is_lost_does_not_come_back_by_itself(
    browser: Browser, stage: Stage
) -> None:
    stage.deploy("hidden-and-lost")
    with relaying(stage) as relay, looking(browser, relay.url) as page:
        page.clock.install()
        page.goto(relay.login_link())
        expect(page.get_by_role("link", name="hidden-and-lost", exact=True)).to_be_visible()
        relay.cut()
        expect(page.locator("#lost")).to_be_visible()
        page.evaluate(HIDE, True)
        page.clock.run_for(31_000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        relay.mend()
        page.evaluate("dispatchEvent(new Event('online'))")
        page.clock.run_for(60_000)
        assert asked == []
        page.evaluate(HIDE, False)
        expect(page.locator("#link-state")).to_have_text("Live")
        expect(page.locator("#lost")).to_be_hidden()


def test_a_run_that_is_gone_when_the_connection_is_back(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("gone-meanwhile")
    with relaying(stage) as relay, looking(browser, f"{relay.login_link()}#/run/{instance}") as page:
        expect(page.locator("#link-state")).to_have_text("Live")
        relay.cut()
        expect(page.locator("#lost")).to_contain_text("it goes on by itself")
        stage.do(stage.world.plane.delete("ann", instance))
        stage.do(gone(stage, instance))
        relay.mend()
        expect(page.locator(".run-head .why")).to_contain_text("There is no run called")
        expect(page.locator("#link-state")).to_have_text("Stopped")
        expect(page.locator("#lost")).to_be_hidden()


async def gone(stage: Stage, instance: str) -> None:
    with suppress(DeploymentNotFound):
        async with asyncio.timeout(20):
            while True:
                await stage.world.memory.get(instance)
                await asyncio.sleep(0.02)


def test_what_is_refused_for_good_is_not_asked_for_again(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("refused")
    stage.call(stage.actors.report, instance, 0, 1, loss=1.0)
    with looking(browser, stage.url) as page:
        page.clock.install()
        asked: list[str] = []

        def refuse(route: Route) -> None:
            asked.append(route.request.url)
            route.fulfill(status=404, json={"error": {"message": "there is no such run"}})

        page.route("**/series?*", refuse)
        page.route("**/events?*", refuse)
        page.goto(f"{stage.login_link()}#/run/{instance}")
        expect(page.locator(".run-head .phase")).to_contain_text("ready")
        for _ in range(6):
            page.clock.run_for(5_000)
            page.evaluate("new Promise((done) => queueMicrotask(done))")
        kinds = sorted(url.rpartition("/")[2].partition("?")[0] for url in asked)
        assert kinds == ["events", "series"]


def test_a_log_out_that_fails_is_told_and_the_page_goes_on(page: Page, stage: Stage) -> None:
    stage.deploy("still-here")
    page.route("**/console/logout", lambda route: route.abort())
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("dialog", name="Still logged in")).to_contain_text("the server does not answer")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#link-state")).to_have_text("Live")
    expect(page.get_by_role("link", name="still-here", exact=True)).to_be_visible()


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


def test_the_page_is_as_live_as_the_least_of_what_it_follows(browser: Browser, stage: Stage) -> None:
    """The run's own stream is back; the log's is not."""
    instance = stage.deploy("two-streams", target=1)
    stage.do(stage.actors.write(instance, 0, "before"))
    with relaying(stage) as relay, looking(browser, f"{relay.login_link()}#/run/{instance}/logs") as page:
        expect(page.locator(".line")).to_have_count(1)
        expect(page.locator("#link-state")).to_have_text("Live")
        page.route("**/logs?*", lambda route: route.abort())
        relay.cut()
        expect(page.locator("#lost")).to_be_visible()
        page.evaluate(NOTE_STATES)
        relay.mend()
        stage.do(stage.world.plane.scale("ann", instance, 2))
        expect(page.locator(".facts .world")).to_have_attribute("aria-label", re.compile("^2 of 2"))
        assert set(page.evaluate("window.states")) == {"lost"}
        expect(page.locator("#lost")).to_be_visible()
        stage.do(stage.actors.write(instance, 0, "after"))
        page.unroute_all()
        expect(page.locator("#link-state")).to_have_text("Live")
        expect(page.locator(".line .text")).to_have_text(["before", "after"])


def test_after_an_hour_of_sleep_it_does_not_take_the_old_connection_for_a_live_one(
    browser: Browser, stage: Stage
) -> None:
    """The timers of a machine that sleeps stand still, and nobody has told it that its connections are gone."""
    stage.deploy("asleep")
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(stage.login_link())
        expect(page.get_by_role("link", name="asleep", exact=True)).to_be_visible()
        with page.expect_request("**/watch"):
            page.evaluate("Date.now = ((then) => () => then() + 3_600_000)(Date.now)")
            page.clock.run_for(12_000)
        expect(page.locator("#link-state")).to_have_text("Live")


def test_a_server_that_stands_still_is_told_and_tried(browser: Browser, stage: Stage) -> None:
    stage.deploy("frozen")
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(stage.login_link())
        expect(page.get_by_role("link", name="frozen", exact=True)).to_be_visible()
        page.route("**/watch", lambda _: None)  # it takes the request, and never answers
        page.evaluate("Date.now = ((then) => () => then() + 60_000)(Date.now)")
        page.clock.run_for(6000)
        expect(page.locator("#lost")).to_contain_text("Connection lost")
        page.clock.run_for(2000)
        expect(page.locator("#lost")).to_contain_text("Trying now")
        page.unroute_all()
        for _ in range(20):
            page.clock.run_for(5000)
        expect(page.locator("#link-state")).to_have_text("Live")
        expect(page.locator("#lost")).to_be_hidden()


def test_curves_go_on_after_an_answer_that_broke_off(page: Page, stage: Stage) -> None:
    instance = stage.deploy("broken-off", target=1)
    page.route("**/series?*", lambda route: route.fulfill(body='{"series": [', content_type="application/json"))
    page.goto(f"{stage.url}/#/run/{instance}")
    with page.expect_response("**/series?*"):
        stage.call(stage.actors.report, instance, 0, 1, loss=1.0)
    page.unroute_all()
    expect(page.locator(".metric .dot")).to_be_visible()


def test_a_log_out_elsewhere_ends_this_page_too(page: Page, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ASK_AGAIN_SECONDS", 0.0)
    expect(page.locator("#link-state")).to_have_text("Live")
    other = page.context.new_page()
    other.goto(stage.url)
    other.get_by_role("button", name="Log out").click()
    expect(other.get_by_role("heading", level=1)).to_have_text("Not logged in")
    stage.deploy("not-for-them")
    expect(page.get_by_role("heading", level=1)).to_have_text("Not logged in")
    assert "not-for-them" not in page.content()
