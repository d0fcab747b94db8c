"""Unmodified torchrun agents that are driven through resizes and losses, on our rendezvous and on real etcd.

Training never stops for good, every all-reduce gives the sum for the world that it was taken in, and the agents take
the same ways whatever serves their keys, and by whichever backend they meet there. What waits here waits for
conditions; how long things take is in `benchmarks/elastic.py`.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rendezvous.harness import free_port, real_etcd, service_process
from tests.support.agents import ALL_REDUCE, PATIENCE, TRAIN, TRAIN_WITHOUT_TORCH, Fleet, driven

pytestmark = pytest.mark.timeout(300)

# Long enough that a test which had to wait for it would fail: what is driven never does.
NEVER = ["--rdzv-conf=timeout=600,last_call_timeout=500"]


@contextmanager
def rendezvous(kind: str, folder: Path) -> Iterator[str]:
    if kind == "etcd":
        with real_etcd(folder / "etcd") as (host, port):
            yield f"{host}:{port}"
    else:
        port = free_port()
        with service_process(folder / "ours", "--port", str(port)):
            yield f"127.0.0.1:{port}"


@pytest.fixture(params=["ours", "etcd"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with rendezvous(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def script(endpoint: str, request: pytest.FixtureRequest) -> str:
    """On ours the workers are torch's as well; on etcd the agents are what is compared."""
    return TRAIN if request.node.callspec.params["endpoint"] == "ours" else TRAIN_WITHOUT_TORCH


def assert_sums_are_right(run: Fleet) -> None:
    wrong = [step for step in run.steps() if step.sum != step.world * (step.world + 1) / 2]
    assert wrong == []


def restarts(run: Fleet, since: float) -> set[int]:
    return {step.restarts for step in run.steps() if step.time > since}


def test_a_world_of_2_to_4_starts_grows_shrinks_loses_an_agent_and_ends(
    endpoint: str, script: str, tmp_path: Path
) -> None:
    with (
        Fleet(
            endpoint,
            "story",
            tmp_path / "run",
            nodes=(2, 4),
            options=NEVER,
            script=script,
            linger=2,
            backends=("basilica", "etcd"),
        ) as run,
        driven(endpoint, "story"),
    ):
        run.want(2)
        began = time.time()
        first, second = run.start(2)
        run.first_step(2, began)

        run.want(4)
        began = time.time()
        third, fourth = run.start(2)
        run.first_step(4, began)
        assert restarts(run, began) == {0}

        run.want(3)
        began = time.time()
        fourth.terminate()
        run.first_step(3, began)
        assert restarts(run, began) == {0}  # nobody's workers failed: all were told
        assert fourth.process.wait(PATIENCE) != 0

        third.kill()
        began = time.time()
        (again,) = run.start()
        run.first_step(3, began)

        assert run.finish([first, second, again]) == [0, 0, 0]
        assert_sums_are_right(run)


def test_agents_have_the_numbers_of_their_ranks_however_they_come_and_go(endpoint: str, tmp_path: Path) -> None:
    """torch would number them as they come."""
    folder = tmp_path / "run"
    with (
        Fleet(endpoint, "named", folder, nodes=(2, 4), options=NEVER, script=TRAIN_WITHOUT_TORCH, linger=2) as run,
        driven(endpoint, "named"),
    ):
        run.want(2)
        began = time.time()
        (second,) = run.start(rank=1)
        run.until(lambda: "as rank 0" in second.said(), "agent that came first")
        (first,) = run.start(rank=0)
        run.first_step(2, began)
        run.want(4)
        began = time.time()
        (fourth,) = run.start(rank=3)
        (third,) = run.start(rank=2)
        run.first_step(4, began)
        run.want(3)
        began = time.time()
        fourth.terminate()
        run.first_step(3, began)
        first.kill()
        began = time.time()
        (again,) = run.start(rank=0)
        run.first_step(3, began)
        assert run.finish([again, second, third]) == [0, 0, 0]
        assert {(step.world, step.rank, step.agent) for step in run.steps()} == {
            (world, rank, rank) for world in (2, 3, 4) for rank in range(world)
        }
        assert_sums_are_right(run)


def test_late_joiners_are_taken_in_one_after_the_other_and_not_waited_for(endpoint: str, tmp_path: Path) -> None:
    with (
        Fleet(
            *(endpoint, "late", tmp_path / "run"), nodes=(1, 3), options=NEVER, script=TRAIN_WITHOUT_TORCH, linger=2
        ) as run,
        driven(endpoint, "late"),
    ):
        agents = []
        for world in (1, 2, 3):
            run.want(world)
            began = time.time()
            agents += run.start()
            run.first_step(world, began)
        assert restarts(run, 0) == {0}
        assert run.finish(agents) == [0, 0, 0]
        assert_sums_are_right(run)


FAILS_FOR_GOOD = (
    ALL_REDUCE
    + """
folder = sys.argv[1]
with open(f"{folder}/steps", "a", buffering=1) as ledger:
    while not os.path.exists(f"{folder}/stop"):
        try:
            (total,) = all_reduce([rank + 1])
        except (OSError, RuntimeError):  # a peer left: its agent may have been told of a new round before ours was
            time.sleep(float(os.environ["LINGER"]))
            raise
        ledger.write(f"{time.time()} {world} {rank} {total:g} "
                     f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['AGENT']}\\n")
        time.sleep(0.05)
        if os.path.exists(f"{folder}/fail-{os.environ['AGENT']}"):
            raise SystemExit(3)
os._exit(0)
"""
)


def test_an_agent_that_gave_up_shuts_out_neither_its_successor_nor_a_late_joiner(endpoint: str, tmp_path: Path) -> None:
    """torchrun closes the rendezvous for good when an agent fails: here the run goes on."""
    options = [*NEVER, "--max-restarts=0"]
    folder = tmp_path / "run"
    with (
        Fleet(endpoint, "shut", folder, nodes=(2, 3), options=options, script=FAILS_FOR_GOOD, linger=3) as run,
        driven(endpoint, "shut"),
    ):
        run.want(2)
        began = time.time()
        agents = run.start(2)
        run.first_step(2, began)
        (folder / "fail-0").touch()
        assert agents[0].process.wait(PATIENCE) == 1
        agents[1].process.wait(PATIENCE)  # without restarts the loss of its peer ends it too, and it closes as well
        run.until_open()

        began = time.time()
        again = run.start(2)
        run.first_step(2, began)
        run.want(3)
        began = time.time()
        run.start(1)
        run.first_step(3, began)
        assert not any("RendezvousClosedError" in agent.said() for agent in [*again, *run.agents[-1:]])
        assert_sums_are_right(run)


@pytest.mark.parametrize("seat", [0, 1])
def test_an_agent_that_dies_before_it_said_who_it_is_takes_no_other_with_it(seat: int, tmp_path: Path) -> None:
    died = tmp_path / "died"
    with (
        rendezvous("ours", tmp_path) as endpoint,
        Fleet(
            endpoint,
            "died",
            tmp_path / "run",
            nodes=(2, 4),
            options=NEVER,
            script=TRAIN_WITHOUT_TORCH,
            env={"DIES": str(seat), "DIED": str(died)},
            torchrun="tests.support.dying_agent",
        ) as run,
        driven(endpoint, "died"),
    ):
        run.want(2)
        agents = run.start(2)
        run.until(lambda: any(agent.process.poll() is not None for agent in agents), "death")
        assert died.exists(), run.said()
        (left,) = (agent for agent in agents if agent.process.poll() is None)
        began = time.time()
        (successor,) = run.start()
        run.first_step(2, began)
        assert restarts(run, began) == {0}
        assert run.finish([left, successor]) == [0, 0]
        assert_sums_are_right(run)


def test_an_agent_that_waits_for_a_lost_peer_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """Once it has had workers, torch takes the signal for a failed attempt to meet, and tries again."""
    with (
        rendezvous("ours", tmp_path) as endpoint,
        Fleet(endpoint, "lost", tmp_path / "run", nodes=(2, 2), script=TRAIN_WITHOUT_TORCH) as run,
    ):
        began = time.time()
        left, lost = run.start(2)
        run.first_step(2, began)
        lost.kill()
        run.until(lambda: "Added self to waiting list" in left.said(), "agent that waits")
        left.terminate()
        assert left.process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("backend", ["basilica", "etcd"])
def test_without_a_driver_the_plain_way_still_works(backend: str, tmp_path: Path) -> None:
    with rendezvous("ours", tmp_path) as endpoint:
        options = ["--rdzv-conf=timeout=60,last_call_timeout=2"]
        with Fleet(endpoint, "plain", tmp_path / "run", nodes=(1, 2), options=options, backends=[backend]) as run:
            began = time.time()
            agents = run.start()
            run.first_step(1, began)
            assert run.finish(agents) == [0]


def test_a_resize_while_nobody_drives_is_made_up_for_by_the_next_driver(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        rendezvous("ours", tmp_path) as endpoint,
        Fleet(endpoint, "gap", folder, nodes=(1, 3), options=NEVER, script=TRAIN_WITHOUT_TORCH) as run,
    ):
        run.want(3)
        began = time.time()
        agents = run.start(3)
        with driven(endpoint, "gap"):
            run.first_step(3, began)
        run.want(2)
        began = time.time()
        agents[2].terminate()
        assert agents[2].process.wait(PATIENCE) != 0
        with driven(endpoint, "gap"):
            run.first_step(2, began)
            assert run.finish(agents[:2]) == [0, 0]
        assert_sums_are_right(run)
