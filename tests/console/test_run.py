"""The page of a run: ranks, timeline, what went wrong, curves and the bench."""

import re

from playwright.sync_api import Page, expect

from basilica.core.mesh import Pair, SeenMesh
from basilica.core.seen import Ended
from tests.console import scenes
from tests.console.stage import Stage


def visit(page: Page, stage: Stage, name: str, tab: str = "") -> None:
    page.goto(f"{stage.url}/#/run/{name}{tab}")


def test_a_failed_run_shows_its_culprit(page: Page, stage: Stage) -> None:
    visit(page, stage, scenes.failed(stage))
    card = page.get_by_role("region", name="Rank 3 failed first")
    expect(card).to_contain_text("Exit code1")
    expect(card).to_contain_text("ReasonError")
    expect(card).to_contain_text("no other rank failed by itself")
    expect(card).to_contain_text("step 412 loss 1.7644")
    expect(card.get_by_label("Traceback")).to_have_text(scenes.TRACEBACK)
    expect(page.locator("#link-state")).to_have_text("Complete")
    expect(page.get_by_role("option", name=re.compile("rank 3, lost.*failed first"))).to_be_visible()
    card.get_by_role("link", name="All of rank 3's log").click()
    expect(page.get_by_label("Rank", exact=True)).to_have_value("3")


def test_why_it_is_not_at_target(page: Page, stage: Stage) -> None:
    instance = stage.deploy("waiting", target=2, restarts=3)
    visit(page, stage, instance)
    expect(page.locator(".run-head .why")).to_contain_text("2 of 2 ranks are up")
    stage.call(stage.actors.exit, instance, 1, 1)
    expect(page.locator(".run-head .why")).to_contain_text("rank 1, which exited with code 1, to start again in")


def test_every_rank_is_a_cell_with_a_sign_and_tells_more_when_looked_at(page: Page, stage: Stage) -> None:
    instance = stage.deploy("grid", target=4, restarts=5)
    visit(page, stage, instance)
    grid = page.get_by_role("listbox", name="Ranks")
    expect(grid.get_by_role("option")).to_have_count(4)
    stage.call(stage.actors.exit, instance, 2, 137, "OOMKilled")
    cell = grid.get_by_role("option", name="rank 2, running, 1 restart, node node-0")
    expect(cell).to_be_visible(timeout=20_000)
    assert cell.inner_text().startswith("■")
    cell.hover()
    expect(page.locator(".rank-detail")).to_contain_text("Restarts1")
    expect(page.locator(".rank-detail")).to_contain_text("Nodenode-0")
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".rank-detail")).to_contain_text("Rank1")
    assert grid.get_attribute("aria-activedescendant") == "rank-1"
    page.keyboard.press("Enter")
    expect(page.get_by_label("Rank", exact=True)).to_have_value("1")


def test_the_timeline_tells_of_resizes_and_restarts(page: Page, stage: Stage) -> None:
    visit(page, stage, scenes.training(stage, "story", ranks=8, steps=2))
    marks = page.locator(".timeline .mark title")
    expect(marks.filter(has_text="ScaleObserved: world goes from 4 to 8 ranks")).to_have_count(1)
    expect(marks.filter(has_text="RankFailed")).to_have_count(1)
    expect(page.get_by_role("img", name=re.compile("World over .*8 of 8 ranks up now"))).to_be_visible()
    events = page.locator(".events li")
    expect(events.filter(has_text="RankRestarted")).to_contain_text("rank 5")
    stage.do(stage.world.plane.scale("ann", "story", 6))
    expect(events.filter(has_text="world goes from 8 to 6 ranks")).to_have_count(1)
    expect(page.locator(".grid [role=option]")).to_have_count(6)


def test_a_stalled_rank_shows_where_it_is(page: Page, stage: Stage) -> None:
    instance = scenes.stalled(stage)
    visit(page, stage, instance)
    card = page.get_by_role("region", name="Rank 2 is stalled")
    expect(card).to_contain_text("its main thread is in all_reduce (distributed_c10d.py:2825)")
    expect(card.locator("pre")).to_contain_text("step (train.py:93)")
    expect(page.get_by_role("option", name="rank 2, stalled")).to_be_visible()
    stage.call(stage.actors.stall, instance, 2, None)
    expect(card).to_have_count(0)


def test_what_ranks_report_is_drawn_and_goes_on(page: Page, stage: Stage) -> None:
    instance = scenes.training(stage, "curves", ranks=6, steps=20)
    visit(page, stage, instance)
    loss = page.get_by_role("img", name=re.compile("^loss of 6 ranks"))
    expect(loss.locator(".curve")).to_have_count(1)
    expect(loss.locator(".spread")).to_have_count(1)
    before = loss.locator(".curve").first.get_attribute("d")
    for rank in range(6):
        stage.call(stage.actors.report, instance, rank, 500, loss=9.0)
    expect(loss.locator(".curve").first).not_to_have_attribute("d", before or "")
    page.get_by_role("button", name="All ranks").click()
    expect(loss.locator(".curve.each")).to_have_count(1)
    assert (loss.locator(".curve.each").get_attribute("d") or "").count("M") == 6
    loss.hover()
    expect(page.locator(".chart-told").first).to_contain_text("step")


def test_a_loss_that_is_not_a_number_is_not_hidden(page: Page, stage: Stage) -> None:
    instance = stage.deploy("nan", target=2)
    for step, loss in enumerate((2.0, 1.0, float("nan"))):
        stage.call(stage.actors.report, instance, 1, step, loss=loss)
    visit(page, stage, instance)
    expect(page.locator(".bad-values")).to_contain_text("rank 1 reported NaN at step 2")


def test_large_numbers_that_differ_little_are_drawn(page: Page, stage: Stage) -> None:
    """Next to 1e18 a step of the axis is nothing: a page that counts up by it would never end."""
    instance = stage.deploy("large", target=2)
    for step in range(3):
        for rank in range(2):
            stage.call(stage.actors.report, instance, rank, step, nanoseconds=1e18 + 128 * rank)
    visit(page, stage, instance)
    expect(page.get_by_role("img", name=re.compile("^nanoseconds of 2 ranks")).locator(".spread")).to_be_visible()


def test_the_link_to_a_ranks_log_keeps_the_focus_while_values_change(page: Page, stage: Stage) -> None:
    instance = stage.deploy("focused", target=2)
    stage.call(stage.actors.report, instance, 0, 1, loss=1.0)
    visit(page, stage, instance)
    page.get_by_role("listbox", name="Ranks").focus()
    expect(page.locator(".rank-detail")).to_contain_text("Step1")
    page.keyboard.press("Tab")
    link = page.locator(".rank-detail").get_by_role("link", name="Log")
    expect(link).to_be_focused()
    stage.call(stage.actors.report, instance, 0, 2, loss=0.5)
    expect(page.locator(".rank-detail")).to_contain_text("Step2")
    expect(link).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Rank", exact=True)).to_have_value("0")


def test_the_bench_is_drawn(page: Page, stage: Stage) -> None:
    visit(page, stage, scenes.training(stage, "benched", ranks=8, steps=1))
    part = page.get_by_role("region", name="Bench")
    expect(part).to_contain_text("Between node-0 and node-1, with nccl: bus bandwidth 88.9 GB/s")
    expect(part.get_by_role("img", name=re.compile("Bus bandwidth")).locator("circle")).to_have_count(9)


def test_a_mesh_that_is_not_whole_is_told(page: Page, stage: Stage) -> None:
    instance = stage.deploy("meshed", target=2)
    broken = SeenMesh(hosts=("node-a", "node-b"), failing=(Pair("node-a", "node-b", "no route"),), limit_seconds=0.0)
    stage.call(stage.actors.connected, instance, broken)
    visit(page, stage, instance)
    expect(page.get_by_text("Degraded mesh:")).to_contain_text("node-a cannot reach node-b: no route")


def test_a_deep_link_by_the_friendly_name(page: Page, stage: Stage) -> None:
    stage.deploy("by-name", target=1)
    visit(page, stage, "by-name")
    expect(page.get_by_role("heading", level=1)).to_have_text("by-name")
    visit(page, stage, "never-was")
    expect(page.locator(".run-head .why")).to_have_text("There is no run called never-was.")


def test_who_failed_and_how_is_told_for_an_unknown_exit_too(page: Page, stage: Stage) -> None:
    instance = stage.deploy("unknown", target=2, min=2, max=2)
    stage.fail(instance, 0, Ended(exit_code=None, reason="Unknown", finished_at=1e9, log_tail=("the last line",)))
    visit(page, stage, instance)
    card = page.locator(".card.bad")
    expect(card).to_contain_text("Exit codeunknown")
    expect(card).to_contain_text("the last line")


def test_a_run_that_waits_for_gpus_is_pending_in_the_timeline_too(page: Page, stage: Stage) -> None:
    stage.actors.queue = "waits for 8 GPUs, behind llama"
    try:
        instance = stage.deploy("queued", target=2)
    finally:
        stage.actors.queue = ""
    visit(page, stage, instance)
    expect(page.locator(".run-head .phase")).to_contain_text("pending")
    expect(page.locator(".run-head .why")).to_contain_text("waits for 8 GPUs, behind llama")
    expect(page.locator(".timeline .band title")).to_have_text(["pending"])


def test_of_many_metrics_twelve_are_drawn_and_all_if_asked_for(page: Page, stage: Stage) -> None:
    instance = stage.deploy("metrics", target=1)
    stage.call(stage.actors.report, instance, 0, 1, **{f"layer_{n:02}/{'norm_' * 12}": float(n) for n in range(14)})
    visit(page, stage, instance)
    charts = page.locator(".metric:visible")
    expect(charts).to_have_count(12)
    page.get_by_role("button", name="Show all 14 metrics").click()
    expect(charts).to_have_count(14)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.locator("#main").evaluate("main => main.scrollWidth") == 360
    page.get_by_role("button", name="Show only 12").click()
    expect(charts).to_have_count(12)


def test_what_is_selected_stays_selected_while_events_come(page: Page, stage: Stage) -> None:
    instance = stage.deploy("selected", target=2)
    visit(page, stage, instance)
    events = page.locator(".events li")
    expect(events).to_have_count(2)
    events.last.evaluate("item => getSelection().selectAllChildren(item)")
    before = page.evaluate("String(getSelection())")
    assert "Created" in before
    stage.do(stage.world.plane.scale("ann", instance, 3))
    expect(events.filter(has_text="world goes from 2 to 3 ranks")).to_have_count(1)
    assert page.evaluate("String(getSelection())") == before
    texts = events.all_inner_texts()
    assert len(texts) == len(set(texts))


def test_a_thousand_reasons_are_not_a_sentence(page: Page, stage: Stage) -> None:
    stage.actors.queue = "waits for GPU {}"
    try:
        instance = stage.deploy("reasons", target=64, max=64)
    finally:
        stage.actors.queue = ""
    visit(page, stage, instance)
    why = page.locator(".run-head .why")
    expect(why).to_contain_text("waits for GPU 3")
    expect(why).to_contain_text(f"(all of it: basilica train why {instance})")
    assert len(why.inner_text()) < 700
