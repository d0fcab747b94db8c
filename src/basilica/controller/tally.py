"""The tally of all runs that a controller looks after: time by cause, incidents, and failures of workers.

Metrics have no names of runs, so the time of runs that have ended is added up here.
"""

from collections import Counter

from basilica.core import accounts
from basilica.core.deployment import Deployment
from basilica.core.goodput import Cause
from basilica.core.status import DeploymentStatus
from basilica.core.world import RankExit

Seconds = dict[tuple[str, str], float]  # by unit, `rank` or `gpu`, and cause


class Tally:
    """Counts from the start of the controller on. Runs that it adopts bring their time, but not their incidents."""

    def __init__(self) -> None:
        self.incidents: Counter[str] = Counter()
        self.worker_failures = 0
        self._ended: Seconds = {}
        self._shown: Seconds = {(unit, cause.value): 0.0 for unit in ("rank", "gpu") for cause in Cause}

    def note(self, before: DeploymentStatus, after: DeploymentStatus) -> None:
        """Count what happened between two turns of a run."""
        known = before.incidents[-1].number if before.incidents else 0
        self.incidents.update(each.kind.value for each in after.incidents if each.number > known)
        if after.failures != before.failures:
            seen = {_key(exit) for exit in before.failures}
            new = (exit for exit in after.failures if exit.worker is not None and not exit.echo)
            self.worker_failures += sum(_key(exit) not in seen for exit in new)

    def end(self, run: Deployment) -> None:
        """Add the time of a run that gets no more turns."""
        _add(self._ended, run, None)

    def seconds(self, live: list[Deployment], now: float) -> Seconds:
        """Return the time of all runs by unit and cause. It never goes back.

        The cause of an open segment may be found out later, or end earlier than it seemed: a figure that would fall
        stays until it has been reached again.
        """
        found = dict(self._ended)
        for run in live:
            _add(found, run, now)
        self._shown = {key: max(shown, found.get(key, 0.0)) for key, shown in self._shown.items()}
        return self._shown


def _add(found: Seconds, run: Deployment, now: float | None) -> None:
    account = accounts.goodput_of(run.spec, run.status, now)
    for cause, seconds in account.seconds.items():
        for unit, amount in (("rank", seconds), ("gpu", seconds * account.gpus_per_rank)):
            found[unit, cause.value] = found.get((unit, cause.value), 0.0) + amount


def _key(exit: RankExit) -> tuple[object, ...]:
    return (exit.rank, exit.attempt, exit.worker, exit.pid, exit.finished_at)
