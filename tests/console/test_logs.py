"""The log: live, merged or of one rank, found in, paused, and downloaded; a hundred thousand lines of it."""

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from basilica.server.page import FILES
from tests.console.stage import Stage, looking


def visit(page: Page, stage: Stage, name: str, rank: int | None = None) -> None:
    page.goto(f"{stage.url}/#/run/{name}/logs" + ("" if rank is None else f"?rank={rank}"))


def test_live_merged_and_of_one_rank(page: Page, stage: Stage) -> None:
    instance = stage.deploy("talk", target=2)
    stage.do(stage.actors.write(instance, 0, "zero says a"))
    visit(page, stage, instance)
    lines = page.locator(".line")
    expect(lines).to_have_text(["0zero says a"])
    stage.do(stage.actors.write(instance, 1, "one says b"))
    expect(lines).to_have_text(["0zero says a", "1one says b"])
    page.get_by_label("Rank", exact=True).select_option("1")
    expect(lines.locator(".text")).to_have_text(["one says b"])
    assert page.url.endswith("logs?rank=1")
    stage.do(stage.actors.write(instance, 0, "not shown"))
    stage.do(stage.actors.write(instance, 1, "and c"))
    expect(lines.locator(".text")).to_have_text(["one says b", "and c"])


def test_pause_keeps_what_comes(page: Page, stage: Stage) -> None:
    instance = stage.deploy("paused", target=1)
    stage.do(stage.actors.write(instance, 0, "first"))
    visit(page, stage, instance)
    expect(page.locator(".line")).to_have_count(1)
    page.get_by_role("button", name="Pause").click()
    stage.do(stage.actors.write(instance, 0, "second", "third"))
    expect(page.locator(".log-tools")).to_contain_text("paused, 2 new lines")
    expect(page.locator(".line")).to_have_count(1)
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".line .text")).to_have_text(["first", "second", "third"])


def test_another_rank_ends_a_pause(page: Page, stage: Stage) -> None:
    instance = stage.deploy("pause-and-choose", target=2)
    stage.do(stage.actors.write(instance, 0, "of zero"))
    stage.do(stage.actors.write(instance, 1, "of one"))
    visit(page, stage, instance)
    expect(page.locator(".line")).to_have_count(2)
    page.get_by_role("button", name="Pause").click()
    page.get_by_label("Rank", exact=True).select_option("1")
    expect(page.locator(".line .text")).to_have_text(["of one"])
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "false")


def test_what_comes_while_paused_is_kept_within_bounds(browser: Browser, stage: Stage) -> None:
    """With room for 50 lines instead of 200,000; else it is the page's own code."""
    script = (FILES / "logs.js").read_text()
    small = script.replace("const KEPT = 200_000;", "const KEPT = 50;")
    assert small != script
    instance = stage.deploy("bounded", target=1)
    stage.do(stage.actors.write(instance, 0, *(f"line {n}" for n in range(50))))
    with looking(browser, stage.url) as page:
        page.route("**/logs.js", lambda route: route.fulfill(body=small, content_type="text/javascript"))
        page.goto(stage.login_link())
        visit(page, stage, instance)
        tools = page.locator(".log-tools")
        expect(tools).to_contain_text("50 lines")
        search = page.get_by_role("searchbox", name="Find in the log")
        search.fill("line")
        for _ in range(9):
            search.press("Enter")
        expect(page.locator(".found")).to_have_text("10 of 50")
        stage.do(stage.actors.write(instance, 0, *(f"line {n}" for n in range(50, 55))))
        expect(page.locator(".found")).to_have_text("5 of 50")  # it is still the same line
        page.get_by_role("button", name="Pause").click()
        for begin in range(55, 455, 40):
            stage.do(stage.actors.write(instance, 0, *(f"line {n}" for n in range(begin, begin + 40))))
            expect(tools).to_contain_text(f"paused, {begin + 40 - 55} new lines")
        stage.do(stage.actors.write(instance, 0, "ValueError: at last"))
        expect(tools).to_contain_text("paused, 401 new lines")
        page.get_by_role("button", name="Resume").click()
        expect(tools).to_contain_text("the last 50 lines")
        page.get_by_role("button", name="First error").click()
        expect(page.locator(".found")).to_have_text("line 456")


def test_finding_and_the_first_error(page: Page, stage: Stage) -> None:
    instance = stage.deploy("search", target=1)
    lines = [f"step {n}" for n in range(5000)]
    lines[500] = "eval: mean error 0.25, no errors"
    lines[1234] = "Error: here it began"
    lines[4000] = "ValueError: and this came of it"
    stage.do(stage.actors.write(instance, 0, *lines))
    visit(page, stage, instance)
    expect(page.locator(".log-tools")).to_contain_text("5,000 lines")
    page.get_by_role("button", name="First error").click()
    expect(page.locator(".line[data-marked]")).to_have_text("0Error: here it began")
    expect(page.locator(".line[data-marked]")).to_be_in_viewport()
    search = page.get_by_role("searchbox", name="Find in the log")
    search.fill("STEP 499")
    expect(page.locator(".found")).to_have_text("1 of 11")
    expect(page.locator(".line[data-marked] mark")).to_have_text("step 499")
    search.press("Enter")
    expect(page.locator(".line[data-marked]")).to_have_text("0step 4990")
    search.press("Shift+Enter")
    expect(page.locator(".line[data-marked]")).to_have_text("0step 499")
    page.get_by_text("Only matches").click()
    expect(page.locator(".line")).to_have_count(11)
    search.fill("")
    expect(page.locator("mark")).to_have_count(0)


def test_the_download_is_the_servers_own_text(page: Page, stage: Stage, tmp_path: Path) -> None:
    instance = stage.deploy("saved", target=1)
    stage.do(stage.actors.write(instance, 0, "one", "two"))
    visit(page, stage, instance, rank=0)
    expect(page.locator(".line")).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == f"{instance}-rank-0.log"
    download.value.save_as(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_hundred_thousand_lines_are_few_elements(page: Page, stage: Stage) -> None:
    instance = stage.deploy("long", target=1)
    stage.do(stage.actors.write(instance, 0, *(f"line {n} " + "x" * 60 for n in range(100_000))))
    visit(page, stage, instance)
    expect(page.locator(".log-tools")).to_contain_text("100,000 lines")
    expect(page.locator(".line").last).to_contain_text("line 99999 ")
    assert page.locator(".line").count() < 150
    took = page.evaluate(SCROLL)
    print(
        f"100,000 lines: a frame of a scroll through them takes {took['median']:.1f} ms, at worst {took['worst']:.1f}"
    )
    assert took["median"] < 500  # a long way from freezing, also on a busy machine
    page.locator(".log").evaluate("box => box.scrollTop = 0")
    expect(page.locator(".line").first).to_contain_text("line 0 ")
    stage.do(stage.actors.write(instance, 0, "the newest"))
    expect(page.locator(".log-tools")).to_contain_text("100,001 lines")
    expect(page.locator(".line").first).to_contain_text("line 0 ")  # whoever reads up there stays there
    page.get_by_role("button", name="Newest").click()
    expect(page.locator(".line").last).to_contain_text("the newest")


SCROLL = """async () => {
  const box = document.querySelector('.log');
  const times = [];
  for (let i = 0; i < 40; i += 1) {
    const begin = performance.now();
    box.scrollTop = (box.scrollHeight * i) / 40;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    times.push((performance.now() - begin) / 2);
  }
  times.sort((a, b) => a - b);
  return { median: times[20], worst: times[39] };
}"""
