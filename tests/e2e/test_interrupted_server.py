"""A server that is killed in the middle of what it follows: afterwards nothing is lost, and nothing is told twice."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import basilica
from tests.e2e.incidents import IN_PLACE, Run
from tests.e2e.server import LastingServer
from tests.support.lockstep import until

pytestmark = pytest.mark.timeout(300)

LISTENS = """
import os, time, basilica

folder, rank = os.environ["FOLDER"], os.environ["BASILICA_RANK"]
step = 0
while not os.path.exists(f"{folder}/stop"):
    time.sleep(0.02)
    step += 1
    basilica.report(step=step)
    notice = basilica.notice()
    if notice:
        open(f"{folder}/told.{rank}.{os.environ['BASILICA_ATTEMPT']}", "w").close()
        while not os.path.exists(f"{folder}/save"):
            time.sleep(0.02)
        notice.ready()
"""


def count(events: list[dict[str, Any]], reason: str) -> int:
    return sum(event["count"] for event in events if event["reason"] == reason)


def events_of(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.client.call("GET", f"/deployments/{run.name}/events?limit=500")[1]["events"]
    return found


@pytest.mark.parametrize("known", [False, True], ids=["before the server knows of it", "right after it was told"])
def test_a_failure_at_the_time_of_a_kill_is_one_event_and_one_incident(
    server: LastingServer, tmp_path: Path, known: bool
) -> None:
    run = Run(server, tmp_path / "run", IN_PLACE)
    try:
        run.settle()
        if not known:
            server.kill()
        run.diaries.order(1, 0, "raise", 1)
        (fact,) = until(lambda: run.diaries.find("order", n=1), "an order that is obeyed")
        if known:
            until(run.incidents, "an incident")
            server.kill()
        until(lambda: len(run.diaries.find("lost peer", fact.mono)) >= 2, "peers that fail, too")
        server.start_again()
        run.settle(since=fact.mono + 0.5)
        (incident,) = until(run.incidents, "the incident")
        events = events_of(run)
        assert (incident["kind"], incident["rank"], incident["worker"], incident["exitCode"]) == ("failure", 1, 0, 1)
        assert "RuntimeError: boom 1" in incident["what"]
        assert incident["costSeconds"] > 0
        own = [e for e in events if e["reason"] == "WorkerFailed" and e["type"] == "Warning"]
        assert [(e["count"], "boom 1" in e["message"]) for e in own] == [(1, True)]
    finally:
        run.close()


def test_a_notice_is_followed_to_its_end_by_the_next_server(server: LastingServer, tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    env = {"FOLDER": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with basilica.BasilicaClient(server.url, server.key) as client:
        training = client.deploy_distributed(
            None, source=script, world_size=basilica.WorldSize(1, 2, 3), gpu_count=0, env=env, notice_seconds=60
        )
        until(lambda: all(rank.report is not None for rank in training.refresh().ranks), "reports")
        training.scale(target=3)
        until(lambda: len(list(tmp_path.glob("told.*.0"))) == 2, "ranks that were told")
        server.kill()
        (tmp_path / "save").touch()
        time.sleep(0.5)  # both are ready, and nobody is there to see it
        server.start_again()
        until(lambda: training.refresh().world.ready == 3, "the world of 3")
        answer = training.refresh().view
        assert answer.notice is None
        assert [each.kind for each in answer.incidents] in (["resize"], [])
        events = [(event.reason, event.count) for event in training.events()]
        assert events.count(("NoticePublished", 1)) == 1
        assert not [event for event in events if event[0] in ("NoticeOver", "RankFailed", "RankLost")]
        assert [rank.restarts for rank in answer.ranks] == [0, 0, 0]
        training.delete()


def test_a_crash_loop_is_named_and_its_events_are_folded(server: LastingServer, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text('raise RuntimeError("it never works")\n')
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with basilica.BasilicaClient(server.url, server.key) as client:
        training = client.deploy_distributed(
            None,
            source=script,
            launcher="torchrun --max-restarts=20",
            world_size=basilica.WorldSize(1, 1, 1),
            gpu_count=0,
            env=env,
            wait=False,
        )
        until(lambda: "has failed" in training.why(), "a crash loop that is named")
        said = training.why()
        assert re.search(r"worker 0 of rank 0 has failed [3-6] times in \d+ s: RuntimeError: it never works", said), (
            said
        )

        def failures() -> int:
            return sum(event.count for event in training.events() if event.reason == "WorkerFailed")

        until(lambda: failures() >= 10, "ten failures")
        reasons = [event.reason for event in training.events()]
        assert reasons.count("WorkerFailed") == 1
        assert len(reasons) < 10, reasons
        training.delete()
