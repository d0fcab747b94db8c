"""Judging a run: whether it was ready, has succeeded or failed, or has run out of time."""

from dataclasses import replace

from basilica.core import policy
from basilica.core.events import Reason
from basilica.core.notices import NoticeKind
from basilica.core.phase import Phase, RankPhase
from basilica.core.status import WORLD_READY
from basilica.core.steps import notices
from basilica.core.steps.ending import end
from basilica.core.steps.turn import Turn

TTL_ENDS, DEADLINE_COMES = "its time to live runs out", "its deadline comes"


def notice_readiness(turn: Turn) -> None:
    """The first look that shows `min` ranks up or done counts, even if they are resized or judged in this turn."""
    up = sum(r.phase in (RankPhase.RUNNING, RankPhase.SUCCEEDED) for r in turn.wanted())
    if not turn.status.was_ready and up >= turn.spec.world.min:
        turn.status = replace(turn.status, was_ready=True)
        turn.say(Reason.WORLD_READY, f"the world has reached its minimum of {turn.spec.world.min}")
        turn.milestone(WORLD_READY)


def judge(turn: Turn) -> None:
    wanted = turn.wanted()
    lost = sum(r.phase is RankPhase.LOST for r in wanted)
    succeeded = sum(r.phase is RankPhase.SUCCEEDED for r in wanted)
    size = turn.status.world_target
    errors = [text for number, text in sorted(turn.start_errors.items()) if number < size]
    if errors:
        end(turn, Phase.FAILED, f"could not be started: {errors[0]}")
    elif size and policy.has_succeeded(turn.spec.world, size, succeeded, lost):
        end(turn, Phase.SUCCEEDED, f"{succeeded} of {size} ranks exited 0")
    elif size and policy.has_failed(turn.spec.world, size, lost):
        culprit = policy.find_culprit(turn.status.failures, turn.status.whole_at)
        # Who else failed may still turn out: the evidence is told with the culprit, not frozen here.
        cause = f"{culprit.exit.place} {policy.describe_exit(culprit.exit)}; " if culprit else ""
        left = f"{size - lost} of {size} ranks could still succeed, and {turn.spec.world.min} are needed"
        end(turn, Phase.FAILED, cause + left)


def keep_deadlines(turn: Turn) -> None:
    if turn.status.created_at > turn.now:  # by the clock of another machine that is ahead of ours
        turn.status = replace(turn.status, created_at=turn.now)
    spec, created = turn.spec, turn.status.created_at
    if spec.ttl_seconds and _is_time(turn, created + spec.ttl_seconds, TTL_ENDS):
        end(turn, Phase.CANCELLED, f"its time to live of {spec.ttl_seconds:g} s ran out")
    elif spec.deadline_seconds and _is_time(turn, created + spec.deadline_seconds, DEADLINE_COMES):
        message = f"not done within its deadline of {spec.deadline_seconds:g} s"
        end(turn, Phase.FAILED, message, stop_reason="DeadlineExceeded")
    elif spec.start_deadline_seconds and not turn.status.was_ready and turn.due(created + spec.start_deadline_seconds):
        message = f"fewer than {spec.world.min} ranks were up within {spec.start_deadline_seconds:g} s"
        end(turn, Phase.FAILED, message, stop_reason="DeadlineExceeded")


def _is_time(turn: Turn, moment: float, reason: str) -> bool:
    """Return whether the run ends now: the moment has come, or ranks that were told of it ahead are ready for it."""
    if turn.due(moment):
        return True
    notice = turn.status.notice
    if notice is None or notice.kind is not NoticeKind.DEADLINE or notice.done_at is not None:
        return False
    if not notices.listeners_of(turn):
        notices.end_notice(turn)
        return False
    return not notices.waits_until(turn, NoticeKind.DEADLINE, moment, reason)


def announce_deadlines(turn: Turn) -> None:
    """Tell ranks of a limit that is near. It is the last step that may publish a notice: other changes go first."""
    for limit, reason in ((turn.spec.ttl_seconds, TTL_ENDS), (turn.spec.deadline_seconds, DEADLINE_COMES)):
        moment = turn.status.created_at + (limit or 0.0)
        if not limit or turn.status.notice is not None or not notices.listeners_of(turn):
            continue
        if turn.now < moment and turn.due(moment - turn.spec.notice_seconds):
            notices.waits_until(turn, NoticeKind.DEADLINE, moment, reason)
