"""How runs look in a terminal: what others wrote cannot act on it, and everything fits."""

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from basilica.cli import show, show_bench, show_live
from basilica.cli.train.outcome import exit_code
from basilica.client.views import BenchResult, BenchStatus, Culprit, Event, RankExit, RankStatus, RunView
from basilica.core.world import WorldStatus

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOSTILE = "\x1b]0;owned\x07[bold red]x[/bold red]\x1b[2J\r\n\x9b31m\u202eevil:smile:\x00"


def drawn(
    what: RenderableType, *, width: int = 100, height: int = 40, colours: bool = False, ascii: bool = False
) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii else "utf-8")
    console = Console(
        file=file,
        width=width,
        height=height,
        force_terminal=colours,
        color_system="standard" if colours else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(what)
    file.seek(0)
    return file.read()


def run(ranks: int = 2, *, state: str = "running", **changes: object) -> RunView:
    view = RunView(
        instance="llama-1",
        name="llama",
        namespace="u-local",
        phase="ready",
        message="",
        world=WorldStatus(ranks, max(ranks, 1), 1, max(ranks, 1), False),
        blocked_on=f"{ranks} of {ranks} ranks are up: nothing to wait for",
        created_at=NOW - timedelta(seconds=192),
        ranks=tuple(RankStatus(rank=n, pod_name="p", phase="Running", restarts=0, state=state) for n in range(ranks)),
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def failed(code: int = 7, *, rank: int = 1, signal: str | None = None) -> RunView:
    ended = [
        RankExit(rank=0, exit_code=143, termination_reason="Cancelled", restart_count=0, role="stopped"),
        RankExit(
            rank=rank,
            exit_code=code,
            termination_reason="Error",
            restart_count=2,
            role="culprit",
            signal=signal,
            started_at=NOW,
            finished_at=NOW + timedelta(seconds=75),
        ),
    ]
    blamed = Culprit(
        rank=rank,
        exit_code=code,
        termination_reason="Error",
        evidence=f"rank {rank} exited with code {code}",
        confidence="high",
        log_tail=("loss is NaN",),
    )
    return run(phase="failed", message="too few ranks are left", exits=tuple(ended), culprit=blamed, settled=True)


# ---- foreign text ----------------------------------------------------------------------------------------------------


def test_control_characters_are_shown_and_tabs_are_kept() -> None:
    assert show.clean("a\tb\x1b[31m\r\n\x00\x7f\x9b\u202e") == "a\tb\\x1b[31m\\r\\n\\x00\\x7f\\x9b\\u202e"
    assert show.clean("loss ↓ 損失 é 👩\u200d🚀") == "loss ↓ 損失 é 👩\u200d🚀"
    assert show.clean("\ud800").encode() == b"\\ud800"


def test_a_log_line_loses_its_colours_and_what_was_overwritten() -> None:
    assert show.log_line("\x1b[1;31mred\x1b[0m") == "red"
    assert show.log_line(" 10%|#\r 20%|##\r 30%|###") == " 30%|###"
    assert show.log_line("windows\r") == "windows"
    assert show.log_line("\x1b]0;title\x07\x1b[2J") == "\\x1b]0;title\\x07\\x1b[2J"
    assert show.log_line("") == show.log_line("\r") == ""


@given(st.text())
def test_nothing_that_is_cleaned_can_act(text: str) -> None:
    for shown in (show.clean(text), show.log_line(text)):
        assert not any((ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160 for c in shown)
        shown.encode()


def test_a_hostile_run_cannot_inject_anything_into_any_page() -> None:
    evil = failed()
    rank = RankStatus(rank=0, pod_name=HOSTILE, phase=HOSTILE, restarts=1, node=HOSTILE, state=HOSTILE, note=HOSTILE)
    exit = replace(evil.exits[1], termination_reason=HOSTILE, signal=HOSTILE, role=HOSTILE)
    assert evil.culprit is not None
    blamed = replace(evil.culprit, evidence=HOSTILE, confidence=HOSTILE, log_tail=(HOSTILE,), traceback=HOSTILE)
    event = Event(kind=HOSTILE, reason=HOSTILE, message=HOSTILE, count=2, first_at=NOW, last_at=NOW)
    result = BenchResult(measured_at=NOW, probe_node_a=HOSTILE, probe_node_b=HOSTILE, method=HOSTILE)
    bench = BenchStatus(phase=HOSTILE, message=HOSTILE, result=result, on_worker_nodes=False)
    view = replace(
        evil,
        name=HOSTILE,
        instance=HOSTILE,
        phase=HOSTILE,
        message=HOSTILE,
        ranks=(rank,),
        exits=(exit,),
        culprit=blamed,
    )
    live = replace(view, exits=(), culprit=None, blocked_on=HOSTILE)
    frame = show_live.Frame(view=live, events=[event], lines=[(0, HOSTILE)], trouble=HOSTILE)
    pages: list[RenderableType] = [
        show.runs([view], NOW),
        show.status(view, NOW, width=100),
        show.status(live, NOW, width=100),
        show.exits(view.exits, 1),
        show.outcome(view),
        show.standing(view),
        show.started(view, HOSTILE),
        show.events([event]),
        show_bench.bench(bench),
        show_live.screen(frame, width=100, height=40),
        show.event_fields(event),
        show.change(view),
    ]
    for page in pages:
        text = page if isinstance(page, str) else drawn(page, width=3000)
        assert not set(text) & set("\x1b\x07\x9b\x00\r\u202e")
        assert "[bold red]x[/bold red]" in text, text
    assert show.event_fields(replace(event, message="a\tb", count=1)).split("\t")[3:] == ["a\\tb"]


# ---- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (0, "0s"), (0.44, "0.4s"), (59.9, "59s"), (60, "1m00s"), (3725, "1h02m"), (100_000, "1d3h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert show.duration(seconds) == text


def test_a_clock_that_is_behind_the_servers_shows_no_negative_age() -> None:
    assert show.age(NOW + timedelta(seconds=5), NOW) == "0s"
    assert show.age(None, NOW) == "-"


@pytest.mark.parametrize(
    ("world", "bar"),
    [
        (WorldStatus(0, 4, 1, 4, True), "----------"),
        (WorldStatus(2, 4, 1, 4, False), "#####-----"),
        (WorldStatus(1, 1000, 1, 1000, False), "#" + "-" * 39),
        (WorldStatus(999, 1000, 1, 1000, False), "#" * 39 + "-"),
        (WorldStatus(5, 3, 1, 9, False), "#" * 10),
        (WorldStatus(0, 0, 0, 0, False), "----------"),
    ],
)
def test_the_bar_is_full_only_when_all_are_up(world: WorldStatus, bar: str) -> None:
    assert drawn(show.Bar(world), ascii=True).strip() == bar


def test_signs_are_letters_where_the_terminal_has_nothing_better() -> None:
    text = drawn(show.status(run(100), NOW, width=100), ascii=True)
    assert "#" * 64 in text
    text.encode("ascii")


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_the_list_says_what_there_is_to_know() -> None:
    rows = drawn(show.runs([run(), failed()], NOW)).splitlines()
    assert rows[0].split() == ["NAME", "PHASE", "WORLD", "AGE", "MESSAGE"]
    assert rows[1].split() == ["llama", "ready", "2/2", "3m12s"]
    assert rows[2].split(maxsplit=4) == ["llama", "failed", "2/2", "3m12s", "too few ranks are left"]


def test_states_have_colours() -> None:
    text = drawn(show.ranks_table(run(1).ranks), colours=True)
    assert "\x1b[32mrunning" in text
    assert "\x1b[1;31mlost" in drawn(show.ranks_table(run(1, state="lost").ranks), colours=True)
    assert "\x1b[36m0| \x1b[0mhello" in drawn(show.rank_line(0, "hello"), colours=True)


def test_a_failed_run_names_its_culprit_with_evidence_and_last_lines() -> None:
    text = drawn(show.status(failed(), NOW, width=100))
    assert "1     7     Error      -       culprit  2         1m15s     <- failed first" in text
    assert "rank 1 failed first: it exited with code 7" in text
    assert "1| loss is NaN" in text
    told = drawn(show.outcome(replace(failed(), message="rank 1 exited with code 7; 1 of 2 could still succeed")))
    assert told.count("exited with code 7") == 1


def test_the_exception_of_the_culprit_is_shown_in_place_of_its_last_lines() -> None:
    view = failed()
    assert view.culprit is not None
    said = 'Traceback (most recent call last):\n  File "train.py", line 9, in step\nValueError: no such shape'
    exits = tuple(replace(e, traceback=said) if e.rank == view.culprit.rank else e for e in view.exits)
    raised = replace(view, exits=exits, culprit=replace(view.culprit, traceback=said))
    text = drawn(show.status(raised, NOW, width=140))
    assert '1|   File "train.py", line 9, in step\n1| ValueError: no such shape' in text
    assert "loss is NaN" not in text
    assert [line.plain for line in show.raised(exits)] == ["1| ValueError: no such shape"]


def test_a_doubtful_verdict_says_so() -> None:
    view = failed()
    assert view.culprit is not None
    assert "confidence" not in drawn(show.outcome(view))
    doubtful = replace(view, culprit=replace(view.culprit, confidence="low"))
    assert "with low confidence" in drawn(show.outcome(doubtful))


@pytest.mark.parametrize("ranks", [0, 1, 5, 31, 40, 300, 1024, 20_000])
@pytest.mark.parametrize(("width", "height"), [(20, 16), (40, 12), (80, 24), (200, 60)])
def test_the_live_view_fits_the_terminal(ranks: int, width: int, height: int) -> None:
    view = run(ranks)
    mixed = tuple(replace(r, state="lost", restarts=3) if r.rank % 3 == 0 else r for r in view.ranks)
    event = Event(kind="Warning", reason="RankLost", message="x" * 300, count=1, first_at=NOW, last_at=NOW)
    frame = show_live.Frame(
        view=replace(view, ranks=mixed, blocked_on="y" * 300),
        events=[event] * 10,
        lines=[(n, "z" * 300) for n in range(50)],
        trouble="t" * 300,
        keys="q leaves",
    )
    for shown in (frame, replace(frame, events=(), lines=None, trouble=""), replace(frame, view=view)):
        lines = drawn(show_live.screen(shown, width=width, height=height), width=width, height=height).splitlines()
        assert 4 <= len(lines) < height
        assert all(len(line) <= width for line in lines)


def test_a_thousand_ranks_are_counted_gridded_and_cut_to_those_that_stand_out() -> None:
    ranks = [replace(r, state="lost") if r.rank in (17, 900) else r for r in run(1024).ranks]
    text = drawn(show.status(replace(run(1024), ranks=tuple(ranks)), NOW, width=100), width=100)
    assert "1022 running  2 lost" in text
    assert text.count("✗") == 2
    assert "17    lost" in text
    assert "900   lost" in text
    assert len(text.splitlines()) < 45


def test_a_thousand_exits_do_not_flood_the_status() -> None:
    exits = tuple(replace(failed().exits[0], rank=n, role="stopped") for n in range(1024))
    text = drawn(show.status(replace(failed(), exits=(*exits, failed().exits[1])), NOW, width=100), width=100)
    assert "and 1009 more: 'basilica train exits'" in text
    assert "culprit" in text


def test_a_bench_without_a_result_says_how_far_it_is() -> None:
    assert "is off" in drawn(show_bench.bench(None))
    assert drawn(show_bench.bench(BenchStatus(phase="TimedOut", message="no second node"))).strip() == (
        "bench TimedOut: no second node"
    )
    result = BenchResult(measured_at=NOW, probe_node_a="a", probe_node_b="b", busbw_gbps_p50=12.345)
    text = drawn(show_bench.bench(BenchStatus(phase="Succeeded", result=result, on_worker_nodes=False)))
    assert "12.3 GB/s" in text
    assert "not measured" in text
    assert "their link may be another" in text


# ---- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "code"),
    [
        (run(phase="succeeded"), 0),
        (run(phase="cancelled"), 130),
        (run(phase="failed"), 1),
        (failed(7), 7),
        (failed(137, signal="SIGKILL"), 137),
        (failed(-1, signal="SIGSEGV"), 139),
        (failed(-1), 1),
        (failed(-1, signal="SIGNONSENSE"), 1),
        (failed(0), 1),
        (failed(256), 1),
    ],
)
def test_the_exit_code_of_a_run(view: RunView, code: int) -> None:
    assert exit_code(view) == code
