"""The account of a run: its goodput, the cost of its incidents, and both in words. Pure.

Every place that shows an account calls these functions: the answers of the API, the metrics, `why`, the custom resource
and the texts of client and commands.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from basilica.core import goodput
from basilica.core.goodput import LOSSES, Cause, Goodput
from basilica.core.incidents import Incident
from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus

SHOWN_SHARE = 0.0005  # a share that is below this rounds to 0.0 %
ADVISED_SHARE = 0.01
NOTEWORTHY_SHARE, NOTEWORTHY_SECONDS = 0.1, 10.0  # a loss that is named though nothing is known of the rest
ADVICE: Mapping[Cause, str] = {
    Cause.QUEUED: "ranks waited for room: ask for fewer GPUs, or let the run begin with fewer ranks (a lower minimum in"
    " --world-size)",
    Cause.STARTING: "a smaller image, fewer imports and data that is loaded later make ranks start sooner; each restart"
    " pays for the start again",
    Cause.RENDEZVOUS: "agents wait for the one that comes last: see its start and restarts in 'basilica train events'",
    Cause.RESTORING: "a sharded checkpoint, or one that is closer to the ranks, is read sooner",
    Cause.RECOMPUTING: "save checkpoints more often: the steps since the last one are taken again",
    Cause.SNAPSHOTTING: "save checkpoints less often, or in the background",
    Cause.STALLED: "'basilica train status' has the stacks of a rank that hangs; with --on-stall restart it is started"
    " again",
    Cause.DEGRADED: "find out what fails with 'basilica train exits'; the pause before a restart doubles with each"
    " failure",
    Cause.CHANGING: "resizes and restarts stop ranks: a program that reads basilica.notice() is ready sooner, and a"
    " shorter --grace ends the wait for one that is not",
    Cause.UNATTRIBUTED: "call basilica.report(step=...) in the training loop: what it does is not known otherwise",
}
"""What to do about each loss, and about time of which nothing is known."""

NO_STEPS = "the program reports no steps (basilica.report)"
SOME_STEPS = "no steps were reported for part of the time (basilica.report)"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an incident: seconds of ranks and of their GPUs, and steps that were taken again."""

    seconds: float
    gpu_seconds: float
    steps_recomputed: int


def goodput_of(spec: DeploymentSpec, status: DeploymentStatus, now: float | None) -> Goodput:
    """Return the account of a run up to `now`, or up to its end. None: up to the last change of the status."""
    until = _until(status, now)
    return goodput.goodput(
        _amounts(status, until),
        wall_seconds=max(0.0, until - status.created_at),
        gpus=spec.resources.gpus.count,
        steps_recomputed=status.ledger.steps_recomputed,
    )


def cost_of(incident: Incident, spec: DeploymentSpec, status: DeploymentStatus, now: float | None) -> Cost:
    """Return what an incident of the run has cost; one that is open, so far."""
    seconds = incident.costs(goodput.lost(_amounts(status, _until(status, now)))) / 1e6
    known = status.ledger.steps_recomputed - incident.steps_recomputed
    steps = max(0, known) if incident.is_open else incident.steps_recomputed
    return Cost(seconds, seconds * spec.resources.gpus.count, steps)


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of a run that trained, and the time that was lost, in seconds of ranks; the rest is not known."""

    training_seconds: float
    lost_seconds: float


def spent(status: DeploymentStatus, now: float | None) -> Spent:
    """Return the time up to `now`, or up to the end. None: up to the last change of the status."""
    return _spent(_amounts(status, _until(status, now)))


def spent_and_closed(status: DeploymentStatus) -> Spent:
    """Return the time of segments that are over: it changes only when one ends."""
    return _spent(goodput.totals(status.ledger, (), 0.0))


def _spent(amounts: Mapping[Cause, int]) -> Spent:
    return Spent(amounts[Cause.TRAINING] / 1e6, goodput.lost(amounts) / 1e6)


def _until(status: DeploymentStatus, now: float | None) -> float:
    if status.terminal_at is not None:
        return status.terminal_at
    return status.latest if now is None else now


def _amounts(status: DeploymentStatus, until: float) -> dict[Cause, int]:
    return goodput.totals(status.ledger, (r.segment for r in status.ranks if r.segment is not None), until)


# ---- in words --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of an account, from wherever they come: seconds of ranks by cause, and the run's own time."""

    seconds: Mapping[str, float]
    wall_seconds: float
    least: float
    most: float

    @property
    def ranks(self) -> float:
        """The size of the wanted world, its mean if that has changed."""
        return sum(self.seconds.values()) / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def each(self, cause: str) -> float:
        """Return the seconds of a cause in the mean of all ranks."""
        return self.seconds.get(cause, 0.0) / self.ranks if self.ranks > 0 else 0.0


def figures(account: Goodput) -> Figures:
    return Figures(
        seconds={cause.value: seconds for cause, seconds in account.seconds.items()},
        wall_seconds=account.wall_seconds,
        least=account.least,
        most=account.most,
    )


def describe(account: Figures) -> str:
    """Return the account in a line. Its times are those of one rank, in the mean of all."""
    if account.ranks <= 0:
        return "goodput: nothing counted yet"
    loss = describe_loss(account)
    tail = f"; largest loss: {loss}" if loss else ""
    training = f"training {duration(account.each(Cause.TRAINING))} of {duration(account.wall_seconds)}"
    shape = f"{training} x {count(account.ranks)} {'rank' if account.ranks == 1 else 'ranks'}"
    if account.most - account.least < SHOWN_SHARE:
        return f"goodput {percent(account.least)} % ({shape}{tail})"
    least = percent(account.least) if account.least >= SHOWN_SHARE else "0"
    bounds = f"goodput {least} to {percent(account.most)} %"
    if account.seconds.get(Cause.TRAINING, 0.0) > 0:
        return f"{bounds} ({shape}{tail}): {SOME_STEPS}"
    return f"{bounds}: {NO_STEPS}{tail}"


def describe_loss(account: Figures) -> str:
    """Return the cause that cost most, with its time in the mean of all ranks: `rendezvous 21 s`; empty for none."""
    cause = largest_loss(account.seconds)
    return "" if cause is None else f"{cause} {duration(account.each(cause))}"


def largest_loss(seconds: Mapping[str, float]) -> str | None:
    """Return the cause that cost most; None if nothing was lost."""
    cause = max(LOSSES, key=lambda each: seconds.get(each, 0.0))
    return cause.value if seconds.get(cause, 0.0) > 0 else None


def describe_end(account: Figures) -> str:
    """Return what the end of a run has to say of its account; empty where nothing that matters is known."""
    if account.seconds.get(Cause.TRAINING, 0.0) > 0:
        return describe(account)
    cause = largest_loss(account.seconds)
    if cause is None or account.each(cause) < max(NOTEWORTHY_SECONDS, NOTEWORTHY_SHARE * account.wall_seconds):
        return ""
    return f"largest loss: {describe_loss(account)} of {duration(account.wall_seconds)}"


def advice(account: Figures) -> str:
    """Return what to do about the largest loss, or about unknown time where that is more; empty if neither matters."""
    cause = largest_loss(account.seconds)
    unknown = account.seconds.get(Cause.UNATTRIBUTED, 0.0)
    if cause is None or unknown > account.seconds[cause]:
        cause = Cause.UNATTRIBUTED.value
    whole = sum(account.seconds.values())
    if whole <= 0 or account.seconds.get(cause, 0.0) < ADVISED_SHARE * whole:
        return ""
    return f"{cause}: {ADVICE[Cause(cause)]}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def count(ranks: float) -> str:
    """Return a number of ranks, which is no whole one where the world was resized: `4`, `3.5`."""
    return f"{ranks:.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """Return a duration in words: `0.4 s`, `42 s`, `3 m 12 s`, `2 h 5 m`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
