"""The wire models that only the browser console uses."""

from basilica.core.damage import DamagedRun
from basilica.core.deployment import Deployment
from basilica.core.events import RecordedEvent
from basilica.core.phase import RankPhase
from basilica.core.status import DeploymentStatus
from basilica.core.why import Absence, why
from basilica.wire import responses as out
from basilica.wire.base import Outgoing
from basilica.wire.render import render_damaged, render_event, render_summary, render_usage


class LoginLink(Outgoing):
    """A login link: `path`, opened in a browser on this server, logs in once, until it expires."""

    path: str
    expires_at: str


class BrowserSession(Outgoing):
    """The session of the logged-in user; `now` is the server's clock, for the computation of ages."""

    user: str
    version: str
    now: str


class LoggedOut(Outgoing):
    logged_out: bool


class RunRow(out.DeploymentSummary):
    """A run as a row of the overview. `stalled`: the number of its stalled ranks."""

    usage: out.UsageView
    blocked_on: str
    stalled: int
    last_event: out.EventView | None = None


class RunChanges(Outgoing):
    """Changed runs as they are now, and deleted ones. `all`: the names of all runs, in the first event."""

    runs: list[RunRow]
    deleted: list[str]
    all: list[str] | None = None


def render_row(
    deployment: Deployment, last: RecordedEvent | None, now: float, unattended: Absence | None = None
) -> RunRow:
    """Return the row of a run. `unattended`: why its status may be out of date, if that is a cause for concern."""
    return RunRow(
        **dict(render_summary(deployment)),
        usage=render_usage(deployment.status, None if unattended is not None else now),
        blocked_on=why(deployment.spec, deployment.status, now, unattended),
        stalled=sum(rank.stalled is not None and rank.phase is RankPhase.RUNNING for rank in deployment.status.ranks),
        last_event=None if last is None else render_event(last),
    )


def render_damaged_row(run: DamagedRun) -> RunRow:
    summary = render_damaged(run)
    return RunRow(
        **dict(summary),
        usage=render_usage(DeploymentStatus(created_at=run.created_at), None),
        blocked_on=summary.message or "",
        stalled=0,
    )
