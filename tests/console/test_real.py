"""With the real server, real ranks and `basilica console`: logged in by its link, and through a kill of the server."""

import re
import signal
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from basilica.client import embedded
from tests.console.stage import looking
from tests.support.server import Server, cli, run_request, serving, wait_for

TALK = 'i=0; while [ $i -lt 2000 ]; do echo "rank $RANK says $i"; i=$((i+1)); sleep 0.05; done'
FAIL = 'echo "about to fail"; [ "$RANK" = 1 ] && { echo "ValueError: out of luck" >&2; exit 3; }; sleep 60'


REPORT = """
import time, basilica
for step in range(2000):
    basilica.report(step=step, loss=1 / (step + 1))
    time.sleep(0.02)
"""


def link_of(server: Server, *arguments: str) -> str:
    env = {"BASILICA_API_URL": server.url, "BASILICA_API_KEY": server.key}
    done = cli("console", "--print", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said_numbers(page: Page, rank: int) -> list[int]:
    texts = page.locator(".line .text").all_inner_texts()
    return [int(text.split()[-1]) for text in texts if text.startswith(f"rank {rank} ")]


def test_a_failed_run_of_real_ranks(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        request = run_request("real", FAIL, target=3)
        request["distributed"]["worldSize"]["min"] = 3
        client.post("/deployments", json=request).raise_for_status()
        with looking(browser, link_of(server, "real")) as page:
            expect(page.get_by_role("heading", level=1)).to_have_text("real")
            card = page.get_by_role("region", name="Rank 1 failed first")
            expect(card).to_contain_text("Exit code3", timeout=30_000)
            expect(card).to_contain_text("ValueError: out of luck")
            page.keyboard.press("l")
            expect(page.locator(".line").filter(has_text="ValueError: out of luck")).to_be_visible()
            page.get_by_role("button", name="First error").click()
            expect(page.locator(".line[data-marked]")).to_contain_text("ValueError: out of luck")


def test_what_real_ranks_report_is_drawn_and_goes_on(browser: Browser, tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    with serving(tmp_path / "state") as server, server.client() as client:
        request = run_request("reporting", f"{sys.executable} {script}", target=2)
        client.post("/deployments", json=request).raise_for_status()
        with looking(browser, link_of(server, "reporting")) as page:
            loss = page.get_by_role("img", name=re.compile("^loss of 2 ranks"))
            expect(loss).to_be_visible(timeout=30_000)
            before = loss.locator(".curve").get_attribute("d") or ""
            expect(loss.locator(".curve")).not_to_have_attribute("d", before)
            page.locator(".grid [role=option]").first.hover()
            expect(page.locator(".rank-detail")).to_contain_text("Step")


def test_a_server_that_is_killed_comes_back_and_no_line_is_lost(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        with first.client() as client:
            client.post("/deployments", json=run_request("steady", TALK, target=2)).raise_for_status()
            wait_for(client, "steady", lambda body: body["phase"] == "ready")
        with looking(browser, link_of(first, "steady")) as overview, looking(browser, link_of(first, "steady")) as page:
            overview.goto(f"{first.url}/#/")
            expect(overview.get_by_role("link", name="steady", exact=True)).to_be_visible()
            page.goto(f"{first.url}/#/run/steady/logs?rank=1")
            expect(page.locator(".line").first).to_contain_text("rank 1 says ")
            first.signal(signal.SIGKILL)
            first.wait()
            expect(page.locator("#lost")).to_contain_text("Connection lost")
            expect(page.locator("#link-state")).to_have_text("Connection lost")
            expect(overview.locator("#lost")).to_contain_text("it goes on by itself")
            with serving(tmp_path, "--port", first.url.rpartition(":")[2]) as second:
                expect(page.locator("#link-state")).to_have_text("Live", timeout=30_000)
                expect(page.locator("#lost")).to_be_hidden()
                expect(overview.locator("#link-state")).to_have_text("Live", timeout=30_000)
                before = int(re.sub(r"\D", "", page.locator(".log-tools > :last-child").inner_text()))
                expect(page.locator(".log-tools > :last-child")).to_have_text(
                    re.compile(r"^\d{3,} lines"), timeout=30_000
                )
                page.get_by_role("button", name="Pause").click()
                page.locator(".log").evaluate("box => box.scrollTop = 0")
                seen: set[int] = set()
                total = int(page.evaluate("document.querySelector('.lines').scrollHeight / 19"))
                for top in range(0, total * 19 + 19, 200):
                    page.locator(".log").evaluate("(box, top) => { box.scrollTop = top; }", top)
                    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                    shown = said_numbers(page, 1)
                    assert shown == sorted(set(shown)), "twice, or out of order"
                    seen.update(shown)
                assert seen == set(range(len(seen)))
                assert len(seen) >= before
                with second.client() as client:
                    client.delete("/deployments/steady?wait=20").raise_for_status()
                expect(overview.get_by_role("link", name="steady", exact=True)).to_have_count(0)
                expect(page.locator(".run-head .why")).to_have_text("This run has been deleted.")


def test_the_embedded_server_needs_no_configuration(browser: Browser, tmp_path: Path) -> None:
    env = {"BASILICA_STATE_DIR": str(tmp_path), "BASILICA_IDLE_EXIT": "60"}
    try:
        done = cli("console", "--no-browser", env=env)
        assert done.returncode == 0, done.stderr
        with looking(browser, done.stdout.strip()) as page:
            expect(page.locator(".nothing")).to_contain_text("No runs yet")
            expect(page.locator("#user")).to_have_text("local")
            page.get_by_role("button", name="Log out").click()
            expect(page.locator("main")).to_contain_text("basilica console")
            page.reload()
            expect(page.get_by_role("heading", level=1)).to_have_text("Not logged in")
            page.goto(done.stdout.strip())
            expect(page.locator("main")).to_contain_text("a link logs in once")
    finally:
        embedded.shutdown(tmp_path)


def test_the_command_opens_a_browser(tmp_path: Path) -> None:
    """The browser here is a script that keeps what it was given."""
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/given\n')
    script.chmod(0o755)
    state = tmp_path / "state"
    env = {"BASILICA_STATE_DIR": str(state), "BASILICA_IDLE_EXIT": "60", "BROWSER": str(script)}
    try:
        done = cli("console", "llama", env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        given = (tmp_path / "given").read_text().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/console/login\?code=[\w-]{40,}#/run/llama", given)
    finally:
        embedded.shutdown(state)
