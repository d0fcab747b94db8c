"""Faults that are put into the controller on purpose: what the simulation must find.

Each is a piece of source that is replaced by another in one function, wherever that function is known by name.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from basilica.controller import step
from basilica.core import policy, reconcile
from basilica.core.steps import exits, shaping, sightings


@dataclass(frozen=True)
class Mutant:
    name: str
    function: Callable[..., Any]
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The function with the fault in it, for the time of the block."""
        function = cast(FunctionType, self.function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.name}: the code has changed, so must the mutant"
        names = dict(function.__globals__)
        exec(compile(source.replace(self.old, self.new), inspect.getfile(function), "exec"), names)
        sound = function.__code__
        function.__code__ = names[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = sound


SAVE_THEN_ACT = """\
    if plan.status != deployment.status or plan.events:
        deployment = await store.save_status(deployment, plan.status, plan.events, now=now)
    await _apply(plan, run, store, runtime)
"""
ACT_THEN_SAVE = """\
    await _apply(plan, run, store, runtime)
    if plan.status != deployment.status or plan.events:
        deployment = await store.save_status(deployment, plan.status, plan.events, now=now)
"""

MUTANTS = (
    Mutant("acts before it saves", step.step, SAVE_THEN_ACT, ACT_THEN_SAVE),
    Mutant(
        "saves only what is told in an event",
        step.step,
        "if plan.status != deployment.status or plan.events:",
        "if plan.events:",
    ),
    Mutant("one restart too many", policy.may_restart, "restarts < max_restarts", "restarts <= max_restarts"),
    Mutant("one restart too few", policy.may_restart, "restarts < max_restarts", "restarts < max_restarts - 1"),
    Mutant("restarts cost nothing", exits._restart_or_lose, "restarts = rank.restarts + 1", "restarts = rank.restarts"),
    Mutant(
        "a loss through the platform costs a restart",
        exits._restart_or_lose,
        "next_attempt(restarts=rank.restarts, restart_at=at)",
        "next_attempt(restarts=rank.restarts + 1, restart_at=at)",
    ),
    Mutant("surplus not stopped", shaping.shape_the_world, "rank.rank >= target and rank.phase.may_run", "False"),
    Mutant(
        "a launch that no look shows is made again as another attempt",
        shaping._launch_if_due,
        "elif rank.phase is RankPhase.LAUNCHED and rank.rank not in turn.present:",
        "elif rank.phase is RankPhase.LAUNCHED and rank.rank not in turn.present:\n"
        "        rank = replace(rank, attempt=rank.attempt + 1)",
    ),
    Mutant(
        "the culprit is the last to fail",
        policy.find_culprit,
        "best = min(close, key=lambda e: (_echo(e), moment(e), e.rank, e.worker is None))",
        "best = candidates[-1]",
    ),
    Mutant("fences missing", sightings._fence, "seen.sight is not Sight.ENDED", "False"),
    Mutant("back-off ignored", shaping._launch_if_due, "not turn.due(rank.restart_at)", "False"),
    Mutant("an earlier failure is kept", step.step, "if deployment.status.failing is not None and", "if False and"),
    Mutant("a settled run keeps its failure", reconcile._plan, "if turn.status.settled:", "if False:"),
    Mutant("back-off does not grow", policy.restart_delay, "2 ** min(restarts - 1, 10)", "1"),
)
