"""Goodput, incidents, causes and planned changes on the page of a run, as they change."""

import re
import time

import pytest
from playwright.sync_api import Browser, Page, expect

from basilica.core import notice_rules, policy
from basilica.core.seen import AnswerState, Ended
from tests.console import scenes
from tests.console.stage import Stage, looking
from tests.console.test_run import visit


def shares(page: Page) -> dict[str, float]:
    """The share of each cause in the table."""
    rows = page.locator(".cause-table tbody tr:visible")
    return {
        row.locator("th").inner_text(): float(row.locator("td").first.inner_text().removesuffix(" %"))
        for row in rows.all()
    }


def test_every_second_is_in_the_bar_and_in_the_table(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("ledger", target=4, restarts=3, gpus=2)
    scenes.trained(stage, instance, 20)
    stage.actors.resume[instance] = 15
    stage.call(stage.actors.exit, instance, 1, 1)
    stage.do(stage.world.until(instance, lambda d: d.status.ranks[1].restarts == 1 and d.status.ready == 4))
    scenes.trained(stage, instance, 30)
    with looking(browser, f"{stage.login_link()}#/run/{instance}") as page:
        part = page.get_by_role("region", name="Goodput")
        expect(part.locator(".share")).to_have_text(re.compile(r"^\d\d\.\d %$"))
        expect(part).to_contain_text("Largest loss: degraded, ")
        expect(part).to_contain_text("6 steps recomputed.")
        expect(part.get_by_role("columnheader")).to_have_text(["Cause", "Share", "Rank time", "GPU time"])
        found = shares(page)
        assert next(iter(found)) == "training"
        assert 99.7 < sum(found.values()) < 100.3
        bar = part.get_by_role("listbox", name="Time by cause")
        bar.locator("[data-cause=degraded]").hover()
        sentence = r"degraded \(failed, and not running again yet\): \d+\.\d %, .*s of ranks, .*s of GPUs"
        expect(part.locator(".told")).to_have_text(re.compile(sentence))
        expect(bar.get_by_role("option", name=re.compile(sentence))).to_have_attribute("aria-selected", "true")
        bar.focus()
        page.keyboard.press("Home")
        expect(part.locator(".told")).to_contain_text("training (steps that count)")
        assert bar.get_attribute("aria-activedescendant") == "cause-training"


def test_a_program_that_reports_nothing_has_bounds_and_a_hint(page: Page, stage: Stage) -> None:
    instance = stage.deploy("silent", target=2)
    visit(page, stage, instance)
    part = page.get_by_role("region", name="Goodput")
    expect(part.locator(".share")).to_have_text(re.compile(r"^0 to \d+\.\d %$"))
    expect(part).to_contain_text("reports no steps")
    expect(part.get_by_role("code")).to_have_text("basilica.report(step=…)")
    expect(part.get_by_role("columnheader", name="GPU time")).to_be_hidden()
    stage.call(stage.actors.trains, instance, 5)
    expect(part).to_contain_text("For part of the time no steps were reported")
    expect(page.locator(".legend").filter(has_text="2 training")).to_be_visible()


def test_time_goes_on_by_the_causes_of_ranks_and_nothing_is_asked_for(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("ticking", target=3)
    scenes.trained(stage, instance, 1)
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(f"{stage.login_link()}#/run/{instance}")
        row = page.get_by_role("row", name=re.compile("^training"))
        expect(row).to_be_visible()
        expect(page.locator(".events li").first).to_be_visible()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        before = row.locator("td").nth(1).inner_text()
        page.clock.run_for(4000)
        after = row.locator("td").nth(1).inner_text()
        assert seconds(after) - seconds(before) >= 10  # of 12, as they are rounded
        assert asked == []


def seconds(text: str) -> float:
    """`1m07s`, `42s`, `0.4s`."""
    minutes, _, rest = text.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s"))


def test_an_account_that_nobody_keeps_does_not_go_on(browser: Browser, stage: Stage) -> None:
    """Without a controller the server counts up to the last change: so does the page."""
    instance = stage.deploy("unkept", target=1)
    scenes.trained(stage, instance, 1)
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.route(
            "**/console/session",
            lambda route: route.fulfill(
                json=route.fetch().json() | {"now": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 90))}
            ),
        )
        page.goto(f"{stage.login_link()}#/run/{instance}")
        row = page.get_by_role("row", name=re.compile("^training"))
        expect(row).to_be_visible()
        before = row.inner_text()
        page.clock.run_for(4000)
        assert seconds(row.locator("td").nth(1).inner_text()) < 60, before


def test_an_incident_is_a_piece_of_the_band_a_row_of_the_list_and_a_card(page: Page, stage: Stage) -> None:
    instance = stage.deploy("interrupted", target=4, restarts=3, gpus=8)
    scenes.trained(stage, instance, 10)
    stage.do(stage.world.plane.scale("ann", instance, 5))
    stage.do(stage.world.until(instance, lambda d: d.status.ready == 5))
    scenes.trained(stage, instance, 20, first=11)
    visit(page, stage, instance)
    band = page.get_by_role("listbox", name="Incidents over time")
    expect(band.get_by_role("option")).to_have_count(1)
    expect(page.get_by_role("region", name=re.compile("^↕? *resize 1"))).to_contain_text("world went from 4 to 5")
    ended = Ended(exit_code=137, reason="OOMKilled", signal="SIGKILL", finished_at=time.time())
    stage.call(stage.actors.die, instance, 3, ended)
    card = page.locator(".incident-card")
    expect(card).to_contain_text("rank 3 was killed for memory")
    expect(card.locator("dl")).to_contain_text(
        re.compile(r"Took.*Cost.*s of ranks, .*s of GPUs.*Rank3Exit code137SignalSIGKILLReasonOOMKilled")
    )
    expect(band.get_by_role("option")).to_have_count(2)
    rows = page.locator(".incident-list button")
    expect(rows.first).to_contain_text("failure")
    expect(rows.nth(1)).to_contain_text("resize")
    band.get_by_role("option", name=re.compile("^resize")).click(force=True)
    expect(card).to_contain_text("world went from 4 to 5")
    expect(rows.nth(1)).to_have_attribute("aria-pressed", "true")
    band.focus()
    page.keyboard.press("End")
    expect(card).to_contain_text("rank 3 was killed for memory")
    expect(card.get_by_role("link", name="Log of rank 3")).to_have_attribute("href", re.compile(r"logs\?rank=3$"))
    card.get_by_role("button", name="Show rank 3").click()
    expect(page.get_by_role("listbox", name="Ranks")).to_be_focused()
    expect(page.locator(".rank-detail")).to_contain_text("Rank3")
    expect(page.locator(".grid")).to_be_in_viewport()


def test_an_open_incident_counts_up_and_stays_selected_when_it_is_over(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("open", target=2, restarts=9)
    scenes.trained(stage, instance, 5)
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(f"{stage.login_link()}#/run/{instance}")
        expect(page.get_by_role("region", name="Goodput")).to_be_visible()
        stage.call(stage.actors.report, instance, 0, 5, loss=1.0)
        stage.actors.resume[instance] = 3
        stage.call(stage.actors.exit, instance, 1, 1)
        card = page.locator(".incident-card")
        expect(card).to_contain_text("failure 1, not over yet")
        expect(card.locator("dl")).to_contain_text("so far")
        stage.do(stage.world.until(instance, lambda d: d.status.ready == 2))
        expect(page.locator(".legend").filter(has_text="1 recomputing")).to_be_visible()
        took = card.locator("dd").nth(1)
        before = seconds(took.inner_text().removesuffix(" so far"))
        cost = seconds(card.locator("dd").nth(2).inner_text().removesuffix(" of ranks"))
        page.clock.run_for(4000)
        assert seconds(took.inner_text().removesuffix(" so far")) - before >= 3
        assert seconds(card.locator("dd").nth(2).inner_text().removesuffix(" of ranks")) - cost >= 3
        scenes.trained(stage, instance, 9)
        expect(card).not_to_contain_text("not over yet")
        expect(card.locator("dl")).to_contain_text("Recomputed3 steps")
        expect(took).not_to_contain_text("so far")


def test_many_incidents_are_listed_newest_first_and_all_if_asked_for(page: Page, stage: Stage) -> None:
    instance = stage.deploy("often", target=1, max=64)
    for size in range(2, 11):
        stage.do(stage.world.plane.scale("ann", instance, size))
        stage.do(stage.world.until(instance, lambda d, n=size: d.status.ready == n))  # type: ignore[misc]
    visit(page, stage, instance)
    rows = page.locator(".incident-list li")
    expect(rows).to_have_count(6)
    expect(rows.first).to_contain_text("from 9 to 10")
    page.get_by_role("button", name="Show all 9 incidents").click()
    expect(rows).to_have_count(9)
    expect(rows.last).to_contain_text("from 1 to 2")
    rows.last.get_by_role("button").click()
    expect(page.locator(".incident-card")).to_contain_text("from 1 to 2")
    stage.do(stage.world.plane.scale("ann", instance, 11))
    expect(rows).to_have_count(10)
    expect(page.locator(".incident-card")).to_contain_text("from 1 to 2")


@pytest.mark.parametrize(("crashes", "told"), [(policy.LOOP_LENGTH - 1, 0), (policy.LOOP_LENGTH, 1)])
def test_a_crash_loop_is_told_in_words(page: Page, stage: Stage, crashes: int, told: int) -> None:
    visit(page, stage, scenes.torchrun(stage, f"crashing-{crashes}", crashes=crashes))
    expect(page.get_by_role("option", name="rank 2, running")).to_be_visible()
    loops = page.locator(".crashes li")
    expect(loops).to_have_count(told)
    if told:
        expect(loops).to_contain_text("worker 1 of rank 2 has failed 3 times in 16s: RuntimeError: CUDA error")
        expect(page.locator(".run-head .why")).to_have_attribute("data-tone", "warn")


def test_a_rank_shows_its_workers_its_step_and_what_its_time_goes_to(page: Page, stage: Stage) -> None:
    instance = scenes.torchrun(stage, "workers", crashes=1)
    stage.call(stage.actors.trains, instance, 40)
    visit(page, stage, instance)
    cell = page.get_by_role("option", name=re.compile("^rank 2, running, node node-0, training"))
    expect(cell).to_be_visible()
    assert cell.get_attribute("data-cause") == "training"
    cell.hover()
    detail = page.locator(".rank-detail")
    expect(detail).to_contain_text(re.compile(r"Time goes totraining for \d+s"))
    expect(detail).to_contain_text("Step40")
    expect(detail).to_contain_text("Workers started2 times")
    expect(detail).to_contain_text("Torch ranks8-11")
    expect(detail).to_contain_text("Pids5220, 5221, 5222, 5223")
    expect(detail).to_contain_text("Failed lastworker 1 (torch rank 9)")
    expect(detail).to_contain_text("ExceptionRuntimeError: CUDA error: an illegal memory access was encountered")
    expect(page.locator(".incident-card pre")).to_have_text(scenes.TRACEBACK)
    expect(page.locator(".incident-card dl")).to_contain_text("Rank2Worker1Torch rank9Exit code1")


def test_the_culprit_is_a_worker(page: Page, stage: Stage) -> None:
    visit(page, stage, scenes.failed_worker(stage))
    card = page.get_by_role("region", name="Worker 1 of rank 2 failed first")
    expect(card).to_contain_text("Worker1 of rank 2, torch rank 9, pid 5211")
    expect(card).to_contain_text("Exit code137")
    expect(card).to_contain_text("OOMKilled: killed for want of memory")
    expect(card).to_contain_text("SignalSIGKILL")


def test_a_planned_change_counts_down(browser: Browser, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_rules, "MISSED_AFTER_SECONDS", 600.0)  # else it is announced again, for a later step
    instance = scenes.planned(stage)
    with looking(browser, stage.url) as page:
        page.clock.install()
        page.goto(f"{stage.login_link()}#/run/{instance}")
        banner = page.locator(".notice")
        sentence = r"resize to 2 ranks: waiting for ranks 1 and 3 to be ready at step 1,24\d, (\d+) s at most$"
        expect(banner).to_contain_text(re.compile(sentence))
        expect(page.locator("#said")).to_have_text("planned: resize to 2 ranks")
        expect(page.locator(".run-head .why")).to_be_hidden()
        expect(page.locator(".legend").filter(has_text="2 changing")).to_be_visible()
        before = int(re.search(sentence, banner.inner_text())[1])  # type: ignore[index]
        page.clock.run_for(3000)
        assert int(re.search(sentence, banner.inner_text())[1]) <= before - 3  # type: ignore[index]
        found = stage.do(stage.world.store.get(instance))
        assert found.status.notice is not None
        stage.call(stage.actors.answers, instance, AnswerState.READY, 1, number=found.status.notice.number)
        expect(banner).to_contain_text("waiting for rank 3 to be ready")
        stage.call(stage.actors.answers, instance, AnswerState.READY, 3, number=found.status.notice.number)
        expect(banner).to_be_hidden()
        expect(page.get_by_role("listbox", name="Ranks").get_by_role("option")).to_have_count(2)
        expect(page.locator(".run-head .why")).to_be_visible()


def test_ranks_that_are_waited_for_are_named_in_few_words(page: Page) -> None:
    named = page.evaluate(
        """async () => {
          const { namedRanks } = await import("./console/assets/format.js");
          const even = Array.from({ length: 500 }, (_, n) => 2 * n);
          return [[7], [1, 3], [0, 1, 2, 5], even].map((ranks) => namedRanks(ranks));
        }"""
    )
    assert named == ["rank 7", "ranks 1 and 3", "ranks 0-2 and 5", "ranks 0, 2, 4, 6, 8, 10 and 494 more"]
