"""The account of a run: its goodput, what an incident has cost, and both in words."""

from dataclasses import replace

import pytest

from basilica.core import accounts
from basilica.core.accounts import Figures, cost_of, goodput_of
from basilica.core.goodput import Cause, Ledger, Segment
from basilica.core.incidents import Incident, IncidentKind
from basilica.core.spec import Gpus, Resources
from basilica.core.status import DeploymentStatus
from basilica.core.world import RankStatus
from tests.core.story import CREATED, Story, done, spec_of, up

SECOND = 1_000_000
SPEC = replace(spec_of(target=2), resources=Resources(gpus=Gpus(8)))


def status_of(**facts: object) -> DeploymentStatus:
    """A run of two ranks, 60 seconds old: one has trained for 40 seconds, one waits for its peers since 10."""
    status = DeploymentStatus(
        created_at=CREATED,
        world_target=2,
        ledger=Ledger(queued=20 * SECOND, training=50 * SECOND, steps_recomputed=7),
        ranks=(
            RankStatus(rank=0, segment=Segment(Cause.TRAINING, CREATED + 20)),
            RankStatus(rank=1, segment=Segment(Cause.RENDEZVOUS, CREATED + 50)),
        ),
    )
    return replace(status, **facts)  # type: ignore[arg-type]


def test_open_segments_count_up_to_now() -> None:
    account = goodput_of(SPEC, status_of(), CREATED + 60)
    assert {cause: account.seconds[cause] for cause in (Cause.TRAINING, Cause.RENDEZVOUS)} == {
        Cause.TRAINING: 90,
        Cause.RENDEZVOUS: 10,
    }
    assert (account.wall_seconds, account.rank_seconds) == (60, 120)
    assert (account.least, account.most) == (0.75, 0.75)
    assert account.largest_loss == (Cause.QUEUED, 20.0)
    assert (account.gpus_per_rank, account.steps_recomputed) == (8, 7)


def test_an_ended_run_counts_up_to_its_end() -> None:
    ended = status_of(terminal_at=CREATED + 35, ranks=())
    account = goodput_of(SPEC, ended, CREATED + 1e6)
    assert (account.wall_seconds, account.rank_seconds) == (35, 70)


def test_a_status_that_nobody_looks_after_counts_up_to_its_last_change() -> None:
    account = goodput_of(SPEC, status_of(whole_at=CREATED + 55), None)
    assert (account.wall_seconds, account.rank_seconds) == (55, 110)


def test_a_run_that_no_controller_has_seen_has_nothing_counted() -> None:
    account = goodput_of(SPEC, DeploymentStatus(created_at=CREATED), CREATED + 3)
    assert accounts.describe(accounts.figures(account)) == "goodput: nothing counted yet"


def test_an_open_incident_costs_what_was_lost_since_it_began() -> None:
    incident = Incident(
        number=1, kind=IncidentKind.FAILURE, at=CREATED + 50, what="", cost=18 * SECOND, steps_recomputed=5
    )
    cost = cost_of(incident, SPEC, status_of(), CREATED + 60)
    assert (cost.seconds, cost.gpu_seconds, cost.steps_recomputed) == (12, 96, 2)
    over = replace(incident, over_at=CREATED + 58, cost=10 * SECOND, steps_recomputed=1)
    cost = cost_of(over, SPEC, status_of(), CREATED + 60)
    assert (cost.seconds, cost.gpu_seconds, cost.steps_recomputed) == (10, 80, 1)


def test_the_account_of_a_story_adds_up_at_every_moment() -> None:
    story = Story(spec_of(target=2, max_restarts=3))
    story.look()
    story.look(up(0), up(1), after=2)
    story.look(up(0), done(1, 1), after=3)
    for later in (0.0, 0.25, 7.5):
        account = goodput_of(story.spec, story.status, story.now + later)
        assert account.rank_seconds == pytest.approx(2 * account.wall_seconds)
    incident = story.status.incidents[-1]
    assert cost_of(incident, story.spec, story.status, story.now + 4).seconds == pytest.approx(4)


def test_the_end_of_a_program_that_reports_nothing_does_not_make_its_time_a_start() -> None:
    story = Story(spec_of(target=2))
    story.all_up()
    story.look(done(0), done(1), after=1000)
    account = goodput_of(story.spec, story.status, story.now)
    assert (account.seconds[Cause.STARTING], account.seconds[Cause.UNATTRIBUTED]) == (0, 2000)


@pytest.mark.parametrize(
    ("seconds", "wall", "text"),
    [
        (
            {"training": 1968, "rendezvous": 84, "starting": 60, "queued": 48},
            540,
            "goodput 91.1 % (training 8 m 12 s of 9 m 0 s x 4 ranks; largest loss: rendezvous 21 s)",
        ),
        ({"training": 60}, 60, "goodput 100.0 % (training 1 m 0 s of 1 m 0 s x 1 rank)"),
        (
            {"training": 50, "changing": 10},
            40,
            "goodput 83.3 % (training 33 s of 40 s x 1.5 ranks; largest loss: changing 6.7 s)",
        ),
        (
            {"unattributed": 931, "starting": 69},
            500,
            "goodput 0 to 93.1 %: the program reports no steps (basilica.report); largest loss: starting 34 s",
        ),
        ({"unattributed": 10}, 10, "goodput 0 to 100.0 %: the program reports no steps (basilica.report)"),
        (
            {"training": 50, "unattributed": 50},
            50,
            "goodput 50.0 to 100.0 % (training 25 s of 50 s x 2 ranks):"
            " no steps were reported for part of the time (basilica.report)",
        ),
        (
            {"degraded": 10},
            10,
            "goodput 0.0 % (training 0 s of 10 s x 1 rank; largest loss: degraded 10 s)",
        ),
        ({}, 0, "goodput: nothing counted yet"),
    ],
)
def test_an_account_in_a_line(seconds: dict[str, float], wall: float, text: str) -> None:
    assert accounts.describe(_figures(seconds, wall)) == text


@pytest.mark.parametrize(
    ("seconds", "wall", "text"),
    [
        ({"training": 60}, 60, "goodput 100.0 % (training 1 m 0 s of 1 m 0 s x 1 rank)"),
        ({"unattributed": 95, "starting": 5}, 100, ""),  # the rest may have been training
        ({"unattributed": 20, "starting": 5}, 25, ""),  # a short run
        ({"unattributed": 80, "degraded": 120}, 100, "largest loss: degraded 1 m 0 s of 1 m 40 s"),
        ({}, 0, ""),
    ],
)
def test_the_end_of_a_run_names_what_is_known_and_matters(seconds: dict[str, float], wall: float, text: str) -> None:
    assert accounts.describe_end(_figures(seconds, wall)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.04, "0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.6, "1 m 0 s"),
        (192, "3 m 12 s"),
        (7505, "2 h 5 m"),
        (273_700, "3 d 4 h"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert accounts.duration(seconds) == text


def _figures(seconds: dict[str, float], wall: float) -> Figures:
    whole = sum(seconds.values()) or 1
    known = seconds.get("training", 0)
    return Figures(
        seconds=seconds,
        wall_seconds=wall,
        least=known / whole,
        most=(known + seconds.get("unattributed", 0)) / whole,
    )
