"""The account of real ranks on a real server: a run that fails and goes on, one that reports nothing, and workers."""

import re
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.console.stage import looking
from tests.console.test_real import link_of
from tests.support.server import Json, run_request, serving

# Rank 1 dies at step 20 of its first attempt, and goes on from step 12.
FAILS_ONCE = """
import os, sys, time, basilica
first = int(os.environ["BASILICA_ATTEMPT"]) == 0
rank = int(os.environ["RANK"])
for step in range(0 if first else 12, 4000):
    basilica.report(step=step, loss=1 / (step + 1))
    if first and rank == 1 and step == 20:
        sys.exit("out of luck")
    time.sleep(0.05)
"""

# Writes the journal of an agent, as the hooks on torch's own would: its worker 1 fails three times.
AGENT = """
import os, time
from basilica.rendezvous.torch_agent import Journal

journal = Journal()
journal.nproc = 2
rank = int(os.environ["RANK"])
for round in range(1, 5):
    journal.add("meeting")
    pids = [os.getpid() + n for n in range(2)]
    workers = [[n, 2 * rank + n, pids[n]] for n in range(2)]
    journal.add("round", round=round, group_rank=rank, agents=2, world=4, workers=workers)
    if rank == 1 and round < 4:
        time.sleep(0.3)
        journal.add("exit", round=round, worker=1, torch_rank=3, pid=pids[1], code=-11 if round < 3 else 1,
                    memory_kills=0, kind="own", message="ValueError: no luck in round %d" % round,
                    traceback="Traceback (most recent call last):\\nValueError: no luck in round %d" % round,
                    seen_at=time.time())
        journal.add("stopped")
    elif rank == 0:
        break
time.sleep(120)
"""


def request_of(name: str, program: Path, *, restarts: int = 3) -> Json:
    request = run_request(name, f"{sys.executable} {program}", target=2)
    request["distributed"]["maxRestarts"] = restarts
    return request


def test_a_run_that_fails_and_goes_on_has_a_goodput_and_an_incident(browser: Browser, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(FAILS_ONCE)
    with serving(tmp_path / "state") as server, server.client() as client:
        client.post("/deployments", json=request_of("once", program)).raise_for_status()
        with looking(browser, link_of(server, "once")) as page:
            card = page.locator(".incident-card")
            expect(card).to_contain_text("rank 1 exited with code 1", timeout=40_000)
            expect(card.locator("dl")).to_contain_text("Exit code1")
            expect(page.locator(".legend").filter(has_text="2 training")).to_be_visible(timeout=40_000)
            part = page.get_by_role("region", name="Goodput")
            expect(part.locator(".share")).to_have_text(re.compile(r"^\d+\.\d %$"))
            expect(part.get_by_role("row", name=re.compile("^degraded"))).to_be_visible()
            expect(part).to_contain_text(re.compile(r"\b(9|[1-9]\d+) steps recomputed"), timeout=40_000)
            expect(card).not_to_contain_text("not over yet")
            page.get_by_role("listbox", name="Ranks").get_by_role("option").nth(1).hover()
            detail = page.locator(".rank-detail")
            expect(detail).to_contain_text(re.compile(r"Time goes totraining for .*Restarts1.*Step"))


def test_a_plain_run_says_that_nobody_knows(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        client.post("/deployments", json=run_request("plain", "sleep 120", target=2)).raise_for_status()
        with looking(browser, link_of(server, "plain")) as page:
            part = page.get_by_role("region", name="Goodput")
            expect(part.locator(".share")).to_have_text(re.compile(r"^0 to \d+\.\d %$"), timeout=30_000)
            expect(part).to_contain_text("basilica.report(step=…)")
            expect(page.locator(".legend").filter(has_text="2 unattributed")).to_be_visible()
            expect(page.locator(".incidents")).to_be_hidden()


def test_workers_of_agents_are_seen(browser: Browser, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    with serving(tmp_path / "state") as server, server.client() as client:
        client.post("/deployments", json=request_of("agents", program)).raise_for_status()
        with looking(browser, link_of(server, "agents")) as page:
            loops = page.locator(".crashes li")
            expect(loops).to_contain_text(
                re.compile(r"worker 1 of rank 1 has failed 3 times in .*s: ValueError: no luck in round 3"),
                timeout=40_000,
            )
            page.get_by_role("listbox", name="Ranks").get_by_role("option").nth(1).hover()
            detail = page.locator(".rank-detail")
            expect(detail).to_contain_text("Workers started4 times")
            expect(detail).to_contain_text("Torch ranks2-3")
            expect(detail).to_contain_text("Failed lastworker 1 (torch rank 3)")
            card = page.locator(".incident-card")
            expect(card.locator("dl")).to_contain_text("Rank1Worker1Torch rank3Exit code1")
            expect(card.locator("pre")).to_contain_text("ValueError: no luck in round 3")
