"""Whatever others write is shown as text: in logs, messages, names of nodes, errors and reports."""

import time

from playwright.sync_api import Browser, Page, expect

from basilica.core.events import Event
from basilica.core.seen import Ended, Stalled
from tests.console import scenes
from tests.console.stage import Stage

MARKUP = "<img src=x onerror=\"document.body.dataset.pwned='yes'\"><script>document.body.dataset.pwned='yes'</script>"
TRICKS = "\x1b]0;title\x07 \u202egnp.exe \x1b[31mred\x1b[0m over\rwritten"


def unharmed(page: Page) -> None:
    assert page.evaluate("document.body.dataset.pwned") is None
    assert page.locator("main img, main script, main iframe").count() == 0


def test_a_hostile_log_line_is_text(page: Page, stage: Stage) -> None:
    instance = stage.deploy("hostile-log", target=1)
    stage.do(stage.actors.write(instance, 0, MARKUP, "x\u202egnp.exe \x07", "\x1b[31mred\x1b[0m", "old\rnew"))
    page.goto(f"{stage.url}/#/run/{instance}/logs")
    expect(page.locator(".line .text")).to_have_text([MARKUP, "x\\u202egnp.exe \\u0007", "red", "new"])
    page.get_by_role("searchbox", name="Find in the log").fill("<script>")
    expect(page.locator("mark")).to_have_text("<script>")
    unharmed(page)


def test_what_a_rank_leaves_behind_is_text(page: Page, stage: Stage) -> None:
    instance = stage.deploy("hostile-exit", target=2, min=2, max=2)
    ended = Ended(
        exit_code=1,
        reason=MARKUP,
        finished_at=1e9,
        signal=MARKUP,
        log_tail=(MARKUP, TRICKS),
        traceback=f"{MARKUP}\n{TRICKS}",
    )
    stage.fail(instance, 1, ended)
    page.goto(f"{stage.url}/#/run/{instance}")
    card = page.locator(".card.bad")
    expect(card).to_contain_text(MARKUP)
    expect(card.locator("pre").first).to_contain_text("<script>")
    unharmed(page)
    page.goto(f"{stage.url}/#/")
    expect(
        page.locator(".rows .run-row", has=page.get_by_role("link", name="hostile-exit", exact=True))
    ).to_contain_text("<img")
    unharmed(page)


def test_what_a_worker_leaves_behind_is_text(page: Page, stage: Stage) -> None:
    instance = stage.deploy("hostile-worker", target=1, restarts=3)
    last_words = {"message": MARKUP, "traceback": f"{MARKUP}\n{TRICKS}", "signal": MARKUP, "reason": MARKUP}
    exits = [scenes.worker_exit(n, time.time(), **last_words) for n in range(1, 5)]
    stage.call(stage.actors.works, instance, 0, scenes.agent_of(0, *exits))
    page.goto(f"{stage.url}/#/run/{instance}")
    card = page.locator(".incident-card")
    expect(card).to_contain_text("<img")
    expect(card.locator("pre")).to_contain_text("<script>")
    expect(page.locator(".crashes")).to_contain_text("has failed 4 times")
    page.get_by_role("listbox", name="Ranks").get_by_role("option").first.hover()
    expect(page.locator(".rank-detail")).to_contain_text("<script>")
    unharmed(page)


def test_nodes_events_stacks_and_metrics_are_text(page: Page, stage: Stage) -> None:
    stage.actors.node = MARKUP
    try:
        instance = stage.deploy("hostile-node", target=2)
    finally:
        stage.actors.node = "node-{}"
    stage.call(stage.actors.report, instance, 0, 1, **{MARKUP: 1.0})
    stage.call(
        stage.actors.stall,
        instance,
        0,
        Stalled(since=1e9, usual_step_seconds=1, where=MARKUP, stack=f"{MARKUP}\n{TRICKS}"),
    )

    async def say() -> None:
        before = await stage.world.store.get(instance)
        await stage.world.store.save_status(before, before.status, [Event(MARKUP, MARKUP, warning=True)], now=2e9)

    stage.do(stage.world.until(instance, lambda d: d.status.ranks[0].stalled is not None))
    stage.do(say())
    page.goto(f"{stage.url}/#/run/{instance}")
    expect(page.locator(".events li").first).to_contain_text("<img")
    expect(page.locator(".card.warn")).to_contain_text("<script>")
    page.locator(".grid [role=option]").first.hover()
    expect(page.locator(".rank-detail")).to_contain_text("<img")
    expect(page.locator(".metric figcaption").first).to_contain_text("<script>")
    unharmed(page)


def test_a_hostile_name_in_the_address_is_text(page: Page, stage: Stage) -> None:
    page.goto(f"{stage.url}/#/run/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    expect(page.locator(".run-head .why")).to_contain_text("There is no run called <img src=x onerror=alert(1)>")
    unharmed(page)
    page.goto(f"{stage.url}/#/run/%E0%A4%A")  # no text at all
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.goto(f"{stage.url}/#/run/..%2F..%2Fusage")
    expect(page.locator(".run-head .why")).to_contain_text("There is no run called")


def test_no_policy_lets_a_script_in(browser: Browser, stage: Stage) -> None:
    """If markup came in all the same, the browser would refuse to run it."""
    page = browser.new_page()
    page.goto(stage.url)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    refused = page.evaluate(
        """() => new Promise((done) => {
          addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));
          const script = document.createElement('script');
          script.textContent = "document.body.dataset.pwned = 'yes'";
          document.body.append(script);
        })"""
    )
    assert refused.startswith("script-src")
    assert page.evaluate("document.body.dataset.pwned") is None
    page.close()


def test_nothing_of_the_session_is_in_reach_of_scripts(page: Page) -> None:
    expect(page.locator("#link-state")).to_have_text("Live")
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})") == "{}"
    assert "code=" not in page.url


def test_what_is_for_a_terminal_is_left_out_and_what_cannot_be_seen_is_shown(page: Page, stage: Stage) -> None:
    instance = stage.deploy("hostile-terminal", target=1)
    lines = [
        "see \x1b]8;;https://elsewhere.example\x1b\\the docs\x1b]8;;\x1b\\ now",
        "\x1b]0;a title\x07\x1b[2K\x1b[1A\x1b[?25l 40% \x1b[38;5;9mred\x1b[0m\x1b(B",
        "pass\u200bword \ufeff\u00ad\U000e0041 \x00 \x9b31m",
        "half a sequence \x1b[31",
        "x" * 1_000_000,
    ]
    stage.do(stage.actors.write(instance, 0, *lines))
    page.goto(f"{stage.url}/#/run/{instance}/logs")
    expect(page.locator(".line .text")).to_have_text(
        [
            "see the docs now",
            " 40% red",
            "pass\\u200bword \\ufeff\\u00ad\\ue0041 \\u0000 \\u009b31m",
            "half a sequence \\u001b[31",
            "x" * 4000 + " … (996,000 more characters are in the download)",
        ]
    )
    page.get_by_role("searchbox", name="Find in the log").fill("[31")
    expect(page.locator("mark")).to_have_text("[31")
    unharmed(page)
