"""How the account of a run looks in a terminal: the bar, the causes, incidents, planned changes, and workers."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.cli import show, show_goodput
from basilica.client.views import (
    Culprit,
    Goodput,
    Incident,
    Loss,
    PlannedChange,
    RankAgent,
    RankExit,
    RankStatus,
    RunView,
)
from basilica.core import accounts
from basilica.core.goodput import AT_WORK, LOSSES, Cause
from tests.cli.test_train_show import HOSTILE, NOW, drawn, failed, run
from tests.client.lying_server import lying, run_body, sequence
from tests.support.server import Server, cli, ended, wait_for

Done = subprocess.CompletedProcess[str]

GOODPUT = Goodput(
    wall_seconds=540,
    rank_seconds=2160,
    gpus_per_rank=8,
    least=1968 / 2160,
    most=1968 / 2160,
    seconds={"training": 1968, "rendezvous": 84, "starting": 60, "queued": 48, "restoring": 0},
    steps_recomputed=12,
    largest_loss=Loss(cause="rendezvous", seconds=84),
)
OVER = Incident(
    number=3,
    kind="failure",
    at=NOW - timedelta(seconds=60),
    over_at=NOW - timedelta(seconds=48),
    what="worker 1 of rank 0 (torch rank 1) was ended by SIGKILL",
    failures=2,
    cost_seconds=48,
    cost_gpu_seconds=384,
    steps_recomputed=12,
)
OPEN = Incident(number=4, kind="resize", at=NOW - timedelta(seconds=5), what="8 ranks are wanted", cost_seconds=2.5)
NOTICE = PlannedChange(
    number=1, kind="scale", since=NOW, until=NOW + timedelta(seconds=20), target=8, step=41, reason="scaled"
)


def account_of(**facts: object) -> RunView:
    return replace(run(4, goodput=GOODPUT, incidents=(OVER, OPEN), notice=NOTICE), **facts)  # type: ignore[arg-type]


def page(view: RunView, **how: object) -> list[str]:
    assert view.goodput is not None
    text = drawn(show_goodput.page(view, view.goodput, NOW), **how)  # type: ignore[arg-type]
    return [line.rstrip() for line in text.splitlines()]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_every_cause_has_a_sign_and_every_loss_an_advice() -> None:
    assert set(show_goodput.CAUSES) == {cause.value for cause in Cause}
    for n in (0, 1):
        signs = [show_goodput.CAUSES[cause][n] for cause in show_goodput.CAUSES]
        assert len(set(signs)) == len(signs), "a cause is told by its sign where there are no colours"
    assert set(accounts.ADVICE) == {*LOSSES, Cause.UNATTRIBUTED}
    assert not set(accounts.ADVICE) & (AT_WORK - {Cause.UNATTRIBUTED})


@pytest.mark.parametrize("width", [60, 100])
def test_the_page_without_colours_at_any_width(width: int) -> None:
    lines = page(account_of(), width=width, ascii=True)
    text = "\n".join(lines)
    bar = next(line for line in lines if line.startswith("###"))
    assert set(bar) == set("#RSQ")
    assert len(bar) == min(width, show_goodput.BAR_WIDTH)
    rows = [line.split() for line in lines]
    assert ["CAUSE", "RANK", "TIME", "SHARE", "GPU", "TIME"] in rows
    assert ["#", "training", "32", "m", "48", "s", "91.1", "%", "4", "h", "22", "m"] in rows
    assert ["R", "rendezvous", "1", "m", "24", "s", "3.9", "%", "11", "m", "12", "s"] in rows
    assert "restoring" not in text, "nothing was lost to it"
    assert "12 steps taken again after incidents" in text
    assert all(len(line) <= width for line in lines)


def test_incidents_have_their_length_their_cost_and_what_they_were() -> None:
    text = "\n".join(page(account_of(), width=200))
    assert "failure, over after 12 s, cost 48 s of ranks (6 m 24 s of GPUs), 12 steps again, 2 failures" in text
    assert "   worker 1 of rank 0 (torch rank 1) was ended by SIGKILL" in text
    assert "resize, goes on for 5 s, so far cost 2.5 s of ranks\n   8 ranks are wanted" in text
    assert "announced: the resize to 8 ranks in 20 s at most, after step 41" in text
    assert "rendezvous: agents wait for the one that comes last" in text


def test_a_run_without_gpus_has_no_column_for_them() -> None:
    bare = replace(GOODPUT, gpus_per_rank=0)
    text = "\n".join(page(account_of(goodput=bare, incidents=(replace(OVER, cost_gpu_seconds=0),))))
    assert "GPU" not in text


def test_an_ended_run_has_advice_for_the_next_time() -> None:
    assert any(line.startswith("next time, rendezvous: ") for line in page(account_of(phase="succeeded"), width=300))


def test_a_program_that_reports_nothing_is_asked_to() -> None:
    silent = Goodput(wall_seconds=10, rank_seconds=20, least=0, most=0.95, seconds={"unattributed": 19, "queued": 1})
    lines = page(account_of(goodput=silent, incidents=(), notice=None), width=200)
    assert "goodput 0 to 95.0 %: the program reports no steps (basilica.report); largest loss: queued 0.5 s" in lines
    assert lines[-1].startswith("unattributed: call basilica.report(step=...)")


def test_a_run_with_no_time_yet() -> None:
    assert page(account_of(goodput=Goodput(), incidents=(), notice=None))[1:] == ["goodput: nothing counted yet"]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=12), st.integers(12, 200))
def test_the_parts_of_the_bar_fill_it_and_none_is_hidden(seconds: list[float], width: int) -> None:
    parts = show_goodput.cells(seconds, width)
    if sum(seconds) > 0:
        assert sum(parts) == width
        assert all((part > 0) == (amount > 0) for part, amount in zip(parts, seconds, strict=True))
    else:
        assert sum(parts) == 0


def test_nothing_that_a_server_says_of_an_account_acts_on_the_terminal() -> None:
    evil = replace(OVER, kind=HOSTILE, what=HOSTILE, reason=HOSTILE)
    notice = replace(NOTICE, kind=HOSTILE, reason=HOSTILE)
    goodput = replace(GOODPUT, seconds={HOSTILE: 5.0, "training": 5.0})
    view = account_of(goodput=goodput, incidents=(evil,), notice=notice)
    worker = RankExit(0, 1, HOSTILE, worker=1, torch_rank=1, message=HOSTILE, traceback=HOSTILE, cause=HOSTILE)
    texts = [
        drawn(show_goodput.page(view, goodput, NOW), width=3000),
        drawn(show.exits([worker], None), width=3000),
        *(drawn(line, width=3000) for line in (*show.exceptions([worker]), *show.raised([worker]))),
    ]
    for text in texts:
        assert not any((ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 for c in text)
        assert "\u202e" not in text


def test_the_page_of_the_documentation_is_what_the_command_prints() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/goodput.md").read_text()
    told = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0].splitlines()
    incident = replace(OVER, number=1, failures=1, what=f"{OVER.what} (exit code 137)")
    printed = page(account_of(incidents=(incident,), notice=None), width=200)
    assert [line for line in told[2:] if not line.startswith("#1 ")] == [
        line for line in printed[1:] if not line.startswith("#1 ")
    ]
    for cause in Cause:
        assert f"\n| `{cause}` | " in text


# ---- the other pages -------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_has_its_goodput_the_open_incident_and_the_countdown() -> None:
    view = account_of()
    text = drawn(show.status(view, NOW, width=200, account=show_goodput.summary(view, NOW)), width=200)
    assert str(GOODPUT) in text
    assert "resize, goes on for 5 s" in text
    assert "over after" not in text, "what is over is on the page of the account"
    assert "announced: the resize to 8 ranks in 20 s at most" in text


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "announced: the resize to 8 ranks in 20 s at most, after step 41"),
        (
            {"waiting_for": (0, 1, 2, 5), "step": None},
            "announced: the resize to 8 ranks in 20 s at most; ranks 0-2 and 5 not ready yet",
        ),
        ({"done_at": NOW}, "announced: the resize to 8 ranks, which is under way"),
        ({"kind": "drain", "reason": "node-1", "until": None, "step": None}, "announced: the drain (node-1)"),
    ],
)
def test_a_planned_change_in_a_line(facts: dict[str, object], text: str) -> None:
    assert show_goodput.notice_line(replace(NOTICE, **facts), NOW).plain == text  # type: ignore[arg-type]


def test_ranks_are_shown_with_the_torch_ranks_of_their_workers() -> None:
    ranks = [
        RankStatus(rank=0, pod_name="p", phase="Running", restarts=0, state="running", agent=RankAgent()),
        RankStatus(
            rank=1,
            pod_name="p",
            phase="Running",
            restarts=0,
            state="running",
            agent=RankAgent(round=1, torch_ranks=(4, 5, 6, 7)),
        ),
    ]
    lines = drawn(show.ranks_table(ranks)).splitlines()
    assert lines[0].split() == ["RANK", "STATE", "TORCH", "RANKS", "RESTARTS", "NODE"]
    assert [line.split()[2] for line in lines[1:]] == ["-", "4-7"]
    assert "TORCH" not in drawn(show.ranks_table(run().ranks))


def test_workers_that_failed_are_shown_with_their_whole_exception() -> None:
    worker = RankExit(
        0,
        1,
        "Error",
        worker=1,
        torch_rank=5,
        role="culprit",
        traceback="Traceback (most recent call last):\n  here\nValueError: nan",
    )
    lines = drawn(show.exits([worker], None)).splitlines()
    assert lines[0].split()[:4] == ["RANK", "WORKER", "TORCH", "RANK"]
    assert lines[1].split()[:4] == ["0", "1", "5", "1"]
    assert "<- failed first" in lines[1]
    told = [line.plain for line in show.exceptions([worker])]
    assert told == [
        "the exception of worker 1 of rank 0 (torch rank 5):",
        "0| Traceback (most recent call last):",
        "0|   here",
        "0| ValueError: nan",
    ]
    assert [line.plain for line in show.exceptions([replace(worker, traceback="", message="RuntimeError: x")])] == [
        "the exception of worker 1 of rank 0 (torch rank 5):",
        "0| RuntimeError: x",
    ]
    assert show.exceptions([replace(worker, traceback="")]) == []
    agent = RankExit(0, 1, "Error", cause="worker 1 of rank 0 (torch rank 5) exited with code 1 (ValueError: nan)")
    assert [line.plain for line in show.raised([agent])] == [f"0| {agent.cause}"]


def test_the_culprit_is_named_with_its_worker() -> None:
    it = Culprit(
        rank=0,
        worker=1,
        torch_rank=5,
        exit_code=1,
        termination_reason="Error",
        evidence="worker 1 of rank 0 (torch rank 5) exited with code 1; no other rank failed by itself",
        confidence="high",
    )
    shown = show.culprit(replace(failed(), culprit=it))
    assert shown is not None
    assert drawn(shown, width=200).startswith("worker 1 of rank 0 (torch rank 5) failed first: it exited with code 1;")


def test_the_end_of_a_run_names_its_goodput_where_that_is_known() -> None:
    ended = run(phase="succeeded", message="all 2 ranks exited with code 0", goodput=GOODPUT)
    assert drawn(show.outcome(ended), width=200).splitlines()[1] == str(GOODPUT)
    assert str(GOODPUT) in drawn(show.blame(ended), width=200)
    silent = replace(ended, goodput=Goodput(wall_seconds=9, rank_seconds=9, seconds={"unattributed": 9}))
    assert "goodput" not in drawn(show.outcome(silent), width=200)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def train(server: Server) -> Callable[..., Done]:
    env = {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": server.key}
    return lambda *arguments: cli("train", *arguments, env=env)


def test_the_account_of_a_real_run(train: Callable[..., Done], server: Server) -> None:
    train("up", "plain", "--world-size", "1", "--max-restarts", "1", "--command", "exit $((1 - BASILICA_ATTEMPT))")
    with server.client() as client:
        wait_for(client, "plain", ended)
    facts = json.loads(train("goodput", "plain", "--json").stdout)
    goodput = facts["goodput"]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["rankSeconds"]) == goodput["wallSeconds"]
    assert goodput["seconds"]["degraded"] >= 1, "it waited for its restart"
    (incident,) = facts["incidents"]
    assert (incident["kind"], incident["rank"], incident["exitCode"]) == ("failure", 0, 1)
    assert incident["costSeconds"] >= 1
    text = train("goodput", "plain").stdout
    assert "degraded" in text
    assert "rank 0 exited with code 1" in text
    assert "\x1b" not in text


def test_a_server_without_accounts_is_told_of() -> None:
    with lying(sequence((200, run_body(running=[0])))) as server:
        env = {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": "k"}
        done = cli("train", "goodput", "run-1", env=env)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "this server keeps no account of a run's time\n"


def test_workers_of_a_live_run_are_shown_before_any_rank_has_exited() -> None:
    worker = {"rank": 0, "exitCode": 1, "restartCount": 0, "worker": 1, "torchRank": 5, "message": "ValueError: nan"}
    with lying(sequence((200, run_body(running=[0], workerExits=[worker])))) as server:
        env = {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": "k"}
        done = cli("train", "exits", "run-1", env=env)
        facts = json.loads(cli("train", "exits", "run-1", "--json", env=env).stdout)
    assert done.returncode == 0
    assert "the run has not ended" in done.stderr
    assert "0| ValueError: nan" in done.stdout
    assert facts["workerExits"] == [worker]
