"""The rounds of a DiLoCo run: who was counted, what it cost and who was waited for; of real replicas, and of many."""

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from basilica.core.reports import ROUND_NUMBERS, Series, SeriesQuery
from basilica.diloco.bucket import Bucket
from basilica.diloco.stores import open_store
from basilica.ports import Run
from basilica.server.page import FILES
from tests.console import scenes
from tests.console.relay import relaying
from tests.console.stage import PHONE, Stage, looking
from tests.console.test_real import link_of
from tests.console.test_speed import GENEROUS, opened
from tests.support.server import run_request, serving, wait_for

REPLICA = """
import os, time
import numpy as np
import basilica
from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce

rank, parameters = int(os.environ["RANK"]), [np.zeros(5000, np.float32)]
with (
    ObjectStoreAllReduce({uri!r}, rank, 3, quorum=2, grace=0.5) as allreduce,
    ArrayDiLoCo(parameters, allreduce, sync_every=5) as diloco,
):
    while diloco.round < 10_000:
        parameters[0] += 0.01 * (rank + 1)
        time.sleep(0.03)
        diloco.step(samples=8)
        basilica.report(step=diloco.step_count, loss=1 / (1 + diloco.step_count))
"""


def part(page: Page) -> Locator:
    return page.get_by_role("region", name="Rounds", exact=True)


def row(page: Page, round: int) -> Locator:
    return part(page).get_by_role("row").filter(has=page.get_by_role("rowheader", name=f"Round {round}", exact=True))


def visit(page: Page, stage: Stage, instance: str) -> None:
    page.goto(f"{stage.url}/#/run/{instance}")


def tell(stage: Stage, instance: str, round: int, *replicas: int, world: int = 3, **changes: float) -> None:
    for replica in replicas:
        missing = tuple(r for r in range(world) if r not in replicas)
        told = scenes.round_of(round, replica, world, missing, **changes)
        stage.call(stage.actors.report, instance, replica, round * 10, **told)


def test_a_real_run_in_which_a_replica_is_killed(browser: Browser, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/bucket"
    script = tmp_path / "replica.py"
    script.write_text(REPLICA.format(uri=uri))
    with serving(tmp_path / "state") as server, server.client() as client:
        request = run_request("exchange", f"exec {sys.executable} {script}", target=3)
        request["distributed"]["worldSize"]["min"] = 2
        client.post("/deployments", json=request).raise_for_status()
        wait_for(client, "exchange", lambda body: body["phase"] == "ready")
        with looking(browser, link_of(server, "exchange")) as page:
            whole = part(page).get_by_role("row").filter(has_text="3 of 3")
            expect(whole.first).to_be_visible(timeout=30_000)
            expect(whole.first.locator(".replica")).to_have_text(["✓0", "✓1", "✓2"])
            label = whole.first.locator(".replica").first.get_attribute("aria-label") or ""
            assert re.fullmatch(
                r"Round \d+, replica 0: counted with weight 40, [\d.]+ KiB up, [\d.]+ KiB down, .*took [\d.]+s", label
            )
            victim = next(m for m in Bucket(open_store(uri)).documents("members") if m["rank"] == 2)
            os.kill(victim["pid"], signal.SIGKILL)
            fewer = part(page).get_by_role("row").filter(has_text="2 of 3")
            expect(fewer.first.locator(".replica")).to_have_text(["✓0", "✓1", "·2"], timeout=30_000)
            waited = part(page).get_by_role("row").filter(has_text="for replica 2").filter(has_text="2 of 3")
            expect(waited.first).to_be_visible(timeout=30_000)
            expect(part(page).locator(".strip rect[data-tone=warn]").first).to_be_visible()
            expect(page.get_by_role("region", name="Metrics").get_by_role("img")).to_have_count(1)
            page.locator(".grid [role=option]").first.hover()
            expect(page.locator(".rank-detail")).to_contain_text("loss")
            expect(page.locator(".rank-detail")).not_to_contain_text("diloco")


def test_a_run_without_rounds_has_no_such_part(page: Page, stage: Stage) -> None:
    instance = stage.deploy("no-rounds", target=1)
    stage.call(stage.actors.report, instance, 0, 1, loss=1.0, diloco_bytes=1e6)
    visit(page, stage, instance)
    expect(page.get_by_role("region", name="Metrics").get_by_role("img")).to_have_count(2)
    expect(part(page)).to_have_count(0)


def test_rounds_come_as_they_are_told_the_newest_first(page: Page, stage: Stage) -> None:
    instance = stage.deploy("live-rounds", target=3)
    tell(stage, instance, 0, 0, 1, 2)
    visit(page, stage, instance)
    expect(row(page, 0)).to_contain_text("3 of 3")
    tell(stage, instance, 1, 0, 2)
    expect(row(page, 1)).to_contain_text("2 of 3")
    expect(row(page, 1)).to_contain_text("5s for replica 1")
    expect(row(page, 1).locator(".replica")).to_have_text(["✓0", "·1", "✓2"])
    told = scenes.round_of(1, 1, 3, (1,))
    stage.call(stage.actors.report, instance, 1, 10, **told)
    expect(row(page, 1).locator(".replica")).to_have_text(["✓0", "!1", "✓2"])
    expect(row(page, 1).get_by_role("gridcell", name=re.compile("replica 1: not counted, 7.72 MiB up"))).to_be_visible()
    expect(part(page).get_by_role("rowheader")).to_have_text(["1", "0"])
    expect(
        part(page).get_by_role("img", name=re.compile("rounds 0 to 1: at least 2 of 3, fewest in round 1"))
    ).to_be_visible()


def test_what_was_told_while_the_connection_was_lost_is_made_up_for(browser: Browser, stage: Stage) -> None:
    instance = stage.deploy("lost-rounds", target=3)
    tell(stage, instance, 0, 0, 1, 2)
    with relaying(stage) as relay, looking(browser, f"{relay.login_link()}#/run/{instance}") as page:
        expect(row(page, 0)).to_contain_text("3 of 3")
        relay.cut()
        expect(page.locator("#lost")).to_be_visible()
        for round in range(1, 9):
            tell(stage, instance, round, 0, 1, *([2] if round % 2 else []))
        relay.mend()
        expect(part(page).get_by_role("rowheader")).to_have_text([str(n) for n in range(8, -1, -1)])
        for round in range(1, 9):
            expect(row(page, round)).to_contain_text("3 of 3" if round % 2 else "2 of 3")


def test_a_run_that_was_resumed_begins_where_it_did(page: Page, stage: Stage) -> None:
    instance = stage.deploy("resumed", target=3)
    for round in range(300, 303):
        tell(stage, instance, round, 0, 1, 2)
    visit(page, stage, instance)
    expect(part(page)).to_contain_text("3 rounds, the newest first.")
    expect(part(page).get_by_role("img", name=re.compile("in rounds 300 to 302: always all 3"))).to_be_visible()


def test_several_processes_and_fragments_of_a_replica(page: Page, stage: Stage) -> None:
    instance = stage.deploy("fragments", target=4)
    for rank in range(4):  # two ranks are one replica: each tells of its shard
        for fragment in (0, 1):
            told = scenes.round_of(0, rank // 2, 2, fragment=fragment, bytes_up=1024.0)
            stage.call(stage.actors.report, instance, rank, fragment, **told)
    visit(page, stage, instance)
    expect(part(page).get_by_role("rowheader")).to_have_text(["0 · 1", "0"])
    second = part(page).get_by_role("row").filter(has=page.get_by_role("rowheader", name="Round 0, fragment 1"))
    expect(second.locator(".replica")).to_have_text(["✓0", "✓1"])
    expect(second.get_by_role("gridcell", name=re.compile("replica 1: counted.* 2 KiB up"))).to_be_visible()
    expect(second).to_contain_text("4 KiB")


def test_the_keyboard_goes_through_the_cells(page: Page, stage: Stage) -> None:
    instance = scenes.rounds(stage, "keys", replicas=4, count=60)
    visit(page, stage, instance)
    expect(part(page).get_by_role("rowheader")).to_have_count(50)
    expect(part(page)).to_contain_text("Rounds 10 to 59 of 60")
    grid = part(page).get_by_role("grid")
    grid.focus()
    detail = part(page).locator(".round-detail")
    expect(detail).to_contain_text("Round 59, replica 0: counted")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    expect(detail).to_contain_text("Round 58, replica 3: ")
    for _ in range(6):
        page.keyboard.press("PageDown")
    expect(detail).to_contain_text("Round 10, replica 3: ")
    active = page.locator(f"[id='{grid.get_attribute('aria-activedescendant')}']")
    expect(active).to_be_in_viewport()
    expect(active).to_have_attribute("aria-selected", "true")
    tell(stage, instance, 60, 0, 1, 2, 3, world=4)
    expect(row(page, 60)).to_be_attached()
    expect(row(page, 10)).to_have_count(0)
    expect(detail).to_contain_text("Point at a replica")  # what was looked at is not there any more
    page.keyboard.press("ArrowDown")
    expect(detail).to_contain_text("Round 60, replica 0: ")
    page.keyboard.press("Tab")
    expect(grid).not_to_be_focused()


def test_where_no_series_are_kept_the_last_reports_are_shown(
    page: Page, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(run: Run, query: SeriesQuery) -> list[Series]:
        return []

    instance = stage.deploy("no-series", target=3)
    for round in (5, 6):
        tell(stage, instance, round, 0, 1, 2)
    monkeypatch.setattr(stage.actors, "series", none)
    visit(page, stage, instance)
    expect(row(page, 6)).to_contain_text("3 of 3")
    expect(part(page)).to_contain_text("What came before this page was opened is not known here yet.")
    tell(stage, instance, 7, 0, 1)
    expect(row(page, 7)).to_contain_text("2 of 3")
    expect(row(page, 5)).to_have_count(0)
    monkeypatch.undo()  # series that come later than the last reports are taken when they do
    tell(stage, instance, 8, 0, 1, 2)
    expect(row(page, 5)).to_contain_text("3 of 3")
    expect(part(page)).to_contain_text("The strip shows")


def test_points_that_stand_for_several_rounds_make_no_row(
    page: Page, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a report file tells that was full: the older half of its points are two rounds each."""
    whole = stage.actors.series

    async def thinned(run: Run, query: SeriesQuery) -> list[Series]:
        found = await whole(run, query)
        merged = []
        for one in found:
            points = one.points[: len(one.points) - len(one.points) % 2]
            pairs = [
                replace(b, mean=(a.mean + b.mean) / 2, min=min(a.min, b.min), max=max(a.max, b.max), count=2)
                for a, b in zip(points[:10:2], points[1:10:2], strict=True)
            ]
            merged.append(replace(one, points=(*pairs, *one.points[10:])))
        return merged

    instance = stage.deploy("thinned", target=3)
    for round in range(20):
        tell(stage, instance, round, 0, 1, *([] if round == 3 else [2]))
    monkeypatch.setattr(stage.actors, "series", thinned)
    visit(page, stage, instance)
    expect(part(page).get_by_role("rowheader")).to_have_text([str(n) for n in range(19, 9, -1)])
    expect(
        part(page).get_by_role("img", name=re.compile("rounds 0 to 19: at least 2 of 3, fewest in round 2"))
    ).to_be_visible()
    expect(part(page)).to_contain_text("Rounds 10 to 19 of 20")


def test_numbers_that_make_no_sense_do_no_harm(page: Page, stage: Stage) -> None:
    instance = stage.deploy("odd-rounds", target=3)
    odd = (float("nan"), float("inf"), -1.0, 0.5, 1e300)
    for value in odd:
        for name in ("round", "fragment", "replica", "members", "world", "bytes_up", "wait_s", "waited_for"):
            stage.call(stage.actors.report, instance, 1, 1, **scenes.round_of(0, 1, 3) | {f"diloco_{name}": value})
    tell(stage, instance, 1, 0, 2)
    visit(page, stage, instance)
    expect(row(page, 1)).to_contain_text("2 of 3")
    assert part(page).locator(".replica").count() <= 4 * part(page).get_by_role("rowheader").count()


def test_many_replicas_and_rounds_do_not_stutter(browser: Browser, stage: Stage) -> None:
    instance = scenes.rounds(stage, "wide-rounds", replicas=64, count=500)
    with looking(browser, stage.login_link()) as page:
        took = opened(page, stage, f"#/run/{instance}", ".replica")
        expect(part(page).get_by_role("rowheader")).to_have_count(50)
        expect(part(page).locator(".replica")).to_have_count(50 * 64)
        assert part(page).locator(".strip rect").count() < 200
        page.evaluate(WATCH)
        loading = page.evaluate("new Promise((done) => requestAnimationFrame(() => done(window.longest)))")
        page.evaluate("window.longest = 0")
        for round in range(500, 505):
            tell(stage, instance, round, *range(64), world=64)
            expect(row(page, round)).to_contain_text("64 of 64")
        expect(part(page).get_by_role("rowheader")).to_have_count(50)
        longest = page.evaluate("window.longest")
        print(
            f"64 replicas, 500 rounds: usable after {took:.2f} s; the longest task {loading:.0f} ms, "
            f"and of five more rounds {longest:.0f} ms"
        )
        assert took < GENEROUS
    with looking(browser, stage.login_link(), viewport=PHONE, is_mobile=True, has_touch=True) as page:
        visit(page, stage, instance)
        expect(part(page).locator(".replica").first).to_be_visible()
        assert page.evaluate("document.getElementById('main').scrollWidth") == PHONE["width"]
        page.locator(".replica").nth(5).tap()
        expect(part(page).locator(".round-detail")).to_contain_text("replica 5: counted")


def test_the_page_and_the_replicas_use_the_same_names() -> None:
    used = set(re.findall(r'"(diloco_\w+)"', (FILES / "rounddata.js").read_text()))
    assert used == set(ROUND_NUMBERS)


WATCH = """() => {
  window.longest = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
  }).observe({ type: 'longtask', buffered: true });
}"""
