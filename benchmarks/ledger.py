"""The ledger of a large run: what a turn costs in which one rank changes, beside a turn of the same run without it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from basilica.core import reconcile as turns
from basilica.core.accounts import goodput_of
from basilica.core.reconcile import reconcile
from basilica.core.seen import SeenProgress, SeenRank, Sight, Sighting
from basilica.core.spec import DeploymentSpec, Exec
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from benchmarks.harness import Figure, median

RANKS = 1024
ROUNDS = 60


def run() -> Iterator[Figure]:
    spec = DeploymentSpec(name="large", program=Exec(("train",)), world=WorldSize(1, RANKS, RANKS))
    status = reconcile(spec, DeploymentStatus(created_at=0.0), Sighting(), 1.0).status
    ranks = [_training(rank) for rank in range(RANKS)]
    status = reconcile(spec, status, Sighting(ranks=tuple(ranks)), 10.0).status
    with_ledger = _milliseconds(spec, status, ranks)
    with patch.object(turns, "account", lambda turn: None), patch.object(turns, "follow_incidents", lambda turn: None):
        without = _milliseconds(spec, status, ranks)
    yield Figure(f"a turn of {RANKS} ranks in which one changes", with_ledger, "ms")
    yield Figure("the same without the ledger", without, "ms")
    yield Figure("with against without", with_ledger / without, "times", "< 1.3")
    began = time.perf_counter()
    for _ in range(ROUNDS):
        goodput_of(spec, status, 11.0)
    yield Figure(f"the account of {RANKS} ranks, for a view", (time.perf_counter() - began) / ROUNDS * 1000, "ms")


def _training(rank: int) -> SeenRank:
    progress = SeenProgress(first_at=5.0, first_step=1, at=9.0, step=50, step_seconds=0.1)
    return SeenRank(rank=rank, attempt=0, sight=Sight.RUNNING, started_at=2.0, node="here", progress=progress)


def _milliseconds(spec: DeploymentSpec, status: DeploymentStatus, ranks: list[SeenRank]) -> float:
    found: list[float] = []
    for number in range(ROUNDS):
        changed = list(ranks)
        progress = ranks[number].progress
        assert progress is not None
        changed[number] = replace(ranks[number], progress=replace(progress, at=10.5, step=60))
        sighting = Sighting(ranks=tuple(changed))
        began = time.perf_counter()
        reconcile(spec, status, sighting, 11.0)
        found.append((time.perf_counter() - began) * 1000)
    return median(found)
