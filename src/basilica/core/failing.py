"""The record of failing turns in a run's status, so that its users see the failure. Pure.

A turn fails as a whole (the runtime cannot be asked) or after its status was saved (an action is refused). So
`reconcile` cannot tell whether a failure is over: the record is removed after the actions of a turn were applied, and
whenever the run is settled, since nobody waits for anything then.
"""

from dataclasses import replace

from basilica.core.errors import BasilicaError
from basilica.core.events import Event, Reason
from basilica.core.status import DeploymentStatus, FailingTurns

RECORD_AFTER_S = 3.0  # a blip is over before that, and writes nothing
CHANGE_AFTER_S = 30.0  # between two records of one failure whose words change from try to try
PROBLEM_CHARS = 300


def describe_problem(error: Exception) -> str:
    """The sentence for an error, in one short line. An error that we did not foresee is named as what it is."""
    text = " ".join(str(error).split())
    if not isinstance(error, BasilicaError):
        text = f"an error in the controller, which its log has in full: {type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= PROBLEM_CHARS else f"{text[: PROBLEM_CHARS - 1]}…"


def record_failure(
    status: DeploymentStatus, since: float, problem: str, now: float
) -> tuple[DeploymentStatus, tuple[Event, ...]] | None:
    """Return the status with the failure in it, and its event; None if nothing is to be written.

    `since`: when the first of the turns began that have failed without one in between that did not.
    """
    known = status.failing
    if status.settled or now - since < RECORD_AFTER_S:
        return None
    if known is not None and (known.problem == problem or now - known.recorded_at < CHANGE_AFTER_S):
        return None
    began = since if known is None else min(since, known.since)
    failing = FailingTurns(since=began, problem=problem, recorded_at=now)
    event = Event(Reason.UNATTENDED, f"the controller cannot look after the run: {problem}", warning=True)
    return replace(status, failing=failing), (event,)


def without_failure(status: DeploymentStatus) -> DeploymentStatus:
    """Return the status after a turn that did not fail."""
    return status if status.failing is None else replace(status, failing=None)
