"""Gangs that are killed anywhere end with the very parameters of an undisturbed one."""

import random
import shutil
from pathlib import Path

import pytest

from basilica.progress.snapshot_file import HEADER_BYTES, header_of
from tests.progress.gangs import Ends, Kill, Task, run_gang

STEPS = 12
WORLD = 3
PLACES = {"step": STEPS, "snapshot": 60, "seal": STEPS, "commit": STEPS, "restore": 20}
KINDS = ["ddp", "fsdp", "plain"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ends]:
    return {kind: run_gang(Task(str(tmp_path_factory.mktemp(kind)), kind, STEPS), [WORLD], []) for kind in KINDS}


def seeded_kills(rng: random.Random) -> list[Kill | None]:
    kills: list[Kill | None] = []
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(list(PLACES))
        kills.append(Kill(rng.randrange(WORLD), place, rng.randint(1, PLACES[place])))
    return kills


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_gang_that_is_killed_ends_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: dict[str, Ends], kind: str, seed: int
) -> None:
    rng = random.Random(f"{kind} {seed}")
    every = rng.choice([1, 1, 3])
    ends = run_gang(Task(str(tmp_path), kind, STEPS, every=every), [WORLD], seeded_kills(rng))
    expected = undisturbed[kind]
    assert (ends.digests, ends.drawn, ends.random) == (expected.digests, expected.drawn, expected.random)
    assert all(lost <= every for lost in ends.lost)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gang_goes_on_in_another_world(tmp_path: Path, kind: str) -> None:
    task = Task(str(tmp_path), kind, STEPS)
    ends = run_gang(task, [WORLD, 4, 2], [Kill(1, "step", 5), Kill(0, "step", 3)])
    assert ends.restored == [6, 6]
    assert len(ends.digests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_without_a_shared_memory_send_each_other_what_is_missing(tmp_path: Path, kind: str) -> None:
    ends = run_gang(Task(str(tmp_path), kind, STEPS, own_hosts=True), [2, 3], [Kill(1, "step", 5)])
    assert ends.restored == [4, 4, 4]
    assert len(ends.digests) == 1


def test_a_host_that_is_lost_costs_a_replicated_state_nothing(tmp_path: Path) -> None:
    def lose_a_host() -> None:
        shutil.rmtree(tmp_path / "host1")

    ends = run_gang(Task(str(tmp_path), "ddp", STEPS, own_hosts=True), [2], [Kill(1, "step", 5)], lose_a_host)
    assert ends.restored == [4, 4]
    assert len(ends.digests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_is_refused_and_the_gang_goes_back_to_the_one_before(tmp_path: Path, kind: str) -> None:
    def damage_the_newest() -> None:
        found = {path: header for path in (tmp_path / "host").iterdir() if (header := header_of(str(path))) is not None}
        newest = max(header.step for header in found.values())
        path = next(path for path, header in found.items() if (header.step, header.rank) == (newest, 0))
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES] ^= 1
        path.write_bytes(data)

    ends = run_gang(Task(str(tmp_path), kind, STEPS), [2], [Kill(1, "step", 5)], damage_the_newest)
    assert ends.restored == [3, 3]
    assert len(ends.digests) == 1
