"""Statuses and events of the custom resource: a part for people, and the whole in a compact form.

An object may have 1.5 MiB at most. The last output of ranks makes a status large; as much of it as necessary is
dropped, and never a verdict.
"""

import base64
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from basilica.core import accounts
from basilica.core.errors import StoreUnavailable
from basilica.core.events import Event, Reason, RecordedEvent
from basilica.core.goodput import charge, parts
from basilica.core.notices import Notice
from basilica.core.policy import Culprit, find_culprit, last_exits
from basilica.core.spec import DeploymentSpec
from basilica.core.status import Condition, DeploymentStatus
from basilica.core.why import why
from basilica.core.world import RankExit, RankStatus, Steps
from basilica.kube.manifests.userdeployment import Json, timestamp
from basilica.stores.encoding import decode_status, encode_status
from basilica.stores.rules import EVENTS_KEPT
from basilica.wire import responses as out
from basilica.wire.base import Outgoing
from basilica.wire.render import filled, render_exit

SPEC_BYTES = 700 << 10
STATE_BYTES = 500 << 10
EVENTS_BYTES = 128 << 10
EXITS_BYTES = 64 << 10
REQUESTED_KEPT = 50
REQUESTED_BYTES = 32 << 10  # all annotations of an object have 256 KiB
MESSAGE_MAX = 2000
UNRESOLVED = 0  # the version of an event whose write had no version yet

FAILURES_KEPT, MESSAGES_KEPT, WHAT_KEPT = 512, 32, 120
_TIMES = (
    "launched_at",
    "started_at",
    "finished_at",
    "seen_at",
    "metered_until",
    "restart_at",
    "missing_since",
    "silent_since",
)
_ONLY_IN_THE_API = ("log_tail", "traceback", "message", "worker", "torch_rank", "pid")
_PLAIN_MAX = 4096  # longer texts are compressed: a thousand ranks are much alike
_PACKED = "zlib:"


def pack(text: str) -> str:
    if len(text) <= _PLAIN_MAX:
        return text
    return _PACKED + base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> str:
    if not text.startswith(_PACKED):
        return text
    return zlib.decompress(base64.b64decode(text.removeprefix(_PACKED))).decode()


# ---- statuses --------------------------------------------------------------------------------------------------------


def status_body(
    spec: DeploymentSpec, status: DeploymentStatus, events: Iterable[RecordedEvent], now: float
) -> dict[str, object]:
    """Return the whole status subresource; the patch that carries it removes fields that are None."""
    world = status.world(spec.world)
    acted_on = status.world_target or world.target  # the spec may be ahead
    culprit = find_culprit(status.failures, status.whole_at) if status.phase.terminal else None
    return {
        "observedGeneration": status.observed_generation,
        "phase": status.phase.value,
        "message": why(spec, status, now)[:MESSAGE_MAX],
        "world": _shown(filled(out.World, world, target=acted_on)),
        "conditions": [_condition(c, status.observed_generation) for c in status.conditions],
        "terminalAt": None if status.terminal_at is None else timestamp(status.terminal_at),
        "settled": status.settled,
        "goodput": _goodput(spec, status, now),
        "notice": None if status.notice is None else _notice(status.notice),
        "culprit": None
        if culprit is None
        else {
            "rank": culprit.exit.rank,
            "exitCode": culprit.exit.exit_code,
            "reason": culprit.exit.termination_reason[:1024],
            "evidence": culprit.evidence[:MESSAGE_MAX],
        },
        **_rank_exits(status, culprit),
        "events": events_text(events, EVENTS_KEPT, EVENTS_BYTES),
        "state": state_text(status),
    }


def _goodput(spec: DeploymentSpec, status: DeploymentStatus, now: float) -> Json | None:
    """Return the goodput in few words, as of this write."""
    account = accounts.figures(accounts.goodput_of(spec, status, now))
    if account.ranks <= 0:
        return None
    least, most = accounts.percent(account.least), accounts.percent(account.most)
    shown = {"percent": least if least == most else f"{least}-{most}", "lost": accounts.describe_loss(account)}
    return {name: text for name, text in shown.items() if text}


def _notice(notice: Notice) -> Json:
    moments = {"since": notice.since, "until": notice.until, "done_at": notice.done_at}
    times = {name: None if moment is None else timestamp(moment) for name, moment in moments.items()}
    return _shown(filled(out.NoticeView, notice, waiting_for=[], **times), "waiting_for") | (
        {"reason": notice.reason[:MESSAGE_MAX]} if notice.reason else {}
    )


def _rank_exits(status: DeploymentStatus, culprit: Culprit | None) -> Json:
    """Return each rank's exit, once the run is over, as the API shows it; without output of the ranks.

    Where there are too many for an object, those that failed are kept, and the rest is counted.
    """
    if not status.phase.terminal:
        return {"rankExits": None, "rankExitsOmitted": None}
    found = last_exits(status.exits)
    kept: dict[int, Json] = {}
    size = 0
    for exit in sorted(found, key=lambda exit: (not exit.failed, exit.rank)):
        shown = _rank_exit(exit, culprit)
        size += len(json.dumps(shown, ensure_ascii=False).encode()) + 2
        if size > EXITS_BYTES:
            break
        kept[exit.rank] = shown
    omitted = len(found) - len(kept)
    return {"rankExits": [kept[rank] for rank in sorted(kept)], "rankExitsOmitted": omitted or None}


def _rank_exit(exit: RankExit, culprit: Culprit | None) -> Json:
    shown = _shown(render_exit(exit, culprit), *_ONLY_IN_THE_API)
    own = {
        "terminationReason": exit.termination_reason[:256],
        "node": exit.node[:256] or None,
        "startedAt": None if exit.started_at is None else timestamp(exit.started_at),
        "finishedAt": timestamp(exit.finished_at),
        "error": exit.error or None,
        "cause": exit.cause[:1024] or None,
    }
    return {name: value for name, value in (shown | own).items() if value is not None}


def _condition(condition: Condition, generation: int) -> Json:
    limited = {"since": timestamp(condition.since), "message": condition.message[:MESSAGE_MAX]}
    return _shown(filled(out.ConditionView, condition, **limited)) | {"observedGeneration": generation}


def _shown(answer: Outgoing, *without: str) -> Json:
    """Return a part of the API's answers as a part of the object."""
    return answer.model_dump(by_alias=True, exclude_none=True, exclude=set(without))


def refusal_body(generation: int, problem: str, now: float) -> Json:
    """Return the status of an object that its schema let pass and that is no run."""
    condition = Condition(type="Accepted", status="False", reason="InvalidSpec", message=problem, since=now)
    return {
        "observedGeneration": generation,
        "phase": "failed",
        "message": problem[:MESSAGE_MAX],
        "conditions": [_condition(condition, generation)],
    }


def waiting_body(known: Json, generation: int, problem: str, now: float) -> Json:
    """Return the status of a run that cannot begin, or go on, before its Secret exists."""
    condition = Condition(
        type="SecretAvailable", status="False", reason="SecretUnavailable", message=problem, since=now
    )
    others = [each for each in known.get("conditions") or () if each.get("type") != condition.type]
    return {
        "phase": known.get("phase") or "pending",
        "message": problem[:MESSAGE_MAX],
        "conditions": [*others, _condition(condition, generation)],
    }


def state_text(status: DeploymentStatus) -> str:
    """Encode the status in full, or with less output of the ranks where it would not fit."""
    for lighter in (
        _as_it_is,
        _without_stacks,
        _with_few_tails,
        _without_tails,
        _without_history,
        _with_light_agents,
        _with_few_failures,
    ):
        text = pack(encode_status(lighter(status)))
        if len(text) <= STATE_BYTES:
            return text
    raise StoreUnavailable(
        f"the status of a run of {len(status.ranks)} ranks does not fit into a Kubernetes object ({len(text)} bytes)"
    )


def state_of(instance: str, text: str) -> DeploymentStatus:
    try:
        return decode_status(unpack(text))
    except (ValueError, zlib.error) as error:
        raise StoreUnavailable(f"the stored status of {instance} cannot be read: {error}") from None


def _as_it_is(status: DeploymentStatus) -> DeploymentStatus:
    return status


def _without_stacks(status: DeploymentStatus) -> DeploymentStatus:
    ranks = (r if r.stalled is None else replace(r, stalled=replace(r.stalled, stack="")) for r in status.ranks)
    return replace(status, ranks=tuple(ranks))


def _with_few_tails(status: DeploymentStatus) -> DeploymentStatus:
    """Keep those of the failures, shortened: users search for the culprit there."""
    lighter = _without_stacks(status)
    exits = tuple(_quiet(e) for e in status.exits)
    return replace(lighter, exits=exits, failures=tuple(_brief(e) for e in status.failures))


def _without_tails(status: DeploymentStatus) -> DeploymentStatus:
    lighter = _with_few_tails(status)
    return replace(lighter, failures=tuple(_quiet(e) for e in status.failures))


def _without_history(status: DeploymentStatus) -> DeploymentStatus:
    return replace(_without_tails(status), history=(), warned=())


def _with_light_agents(status: DeploymentStatus) -> DeploymentStatus:
    """Drop of agents what the next look shows again, and all of ranks that run no more; crash loops without errors."""
    lighter = _without_history(status)
    return replace(lighter, ranks=tuple(_light(rank) for rank in lighter.ranks))


def _light(rank: RankStatus) -> RankStatus:
    if not rank.phase.may_run:
        steps = None if rank.steps is None else Steps(reached=rank.steps.reached)
        return replace(rank, agent=None, crashes=None, steps=steps)
    shown = {"pids": (), "early": (), "group_rank": 0, "world": 0, "first_torch_rank": 0}
    agent = None if rank.agent is None else replace(rank.agent, **shown)  # type: ignore[arg-type]
    crashes = None if rank.crashes is None else replace(rank.crashes, error="")
    return replace(rank, agent=agent, crashes=crashes)


def _with_few_failures(status: DeploymentStatus) -> DeploymentStatus:
    """Keep the first ones, which show who failed first; times to the millisecond, which is more than clocks agree
    on. Crash loops go, too.
    """
    lighter = _with_rounded_segments(_with_light_agents(status))
    few = lighter.failures[:FAILURES_KEPT]
    return replace(
        lighter,
        ranks=tuple(_rounded(_barest(rank)) for rank in lighter.ranks),
        exits=tuple(_rounded(_bare(exit)) for exit in lighter.exits),
        failures=tuple(_rounded(exit if n < MESSAGES_KEPT else _bare(exit)) for n, exit in enumerate(few)),
        incidents=tuple(replace(incident, what=incident.what[:WHAT_KEPT]) for incident in lighter.incidents),
    )


def _barest(rank: RankStatus) -> RankStatus:
    is_due = rank.phase.may_run and rank.started_at is None  # the launch bounds a start that is yet to be seen
    launched_at = rank.launched_at if is_due else None
    return replace(rank, crashes=None, steps=_brief_steps(rank.steps), launched_at=launched_at)


def _bare(exit: RankExit) -> RankExit:
    return replace(exit, cause="", message="", pid=None)


def _brief_steps(steps: Steps | None) -> Steps | None:
    """Return the steps with the process of the rank told by a time that is precise enough (`core.world.Steps`)."""
    if steps is None or steps.process_at is None:
        return steps
    return replace(steps, process_at=round(steps.process_at, 3), at=round(steps.at, 3))


def _with_rounded_segments(status: DeploymentStatus) -> DeploymentStatus:
    """Let open segments begin at the next millisecond. The ledger has the rest: together they are what they were."""
    ledger, ranks = status.ledger, list(status.ranks)
    for n, rank in enumerate(ranks):
        if rank.segment is not None:
            since = math.ceil(rank.segment.since * 1000) / 1000
            own, blocked = parts(rank.segment, since)
            ledger = charge(ledger, rank.segment.cause, own, blocked)
            left = rank.segment.blocked - blocked
            ranks[n] = replace(rank, segment=replace(rank.segment, since=since, blocked=left))
    return replace(status, ledger=ledger, ranks=tuple(ranks))


Timed = TypeVar("Timed", RankExit, RankStatus)


def _rounded(found: Timed) -> Timed:
    times = {name: getattr(found, name) for name in type(found).__dataclass_fields__ if name in _TIMES}
    return replace(found, **{name: round(value, 3) for name, value in times.items() if value is not None})


def _quiet(exit: RankExit) -> RankExit:
    return replace(exit, log_tail=(), traceback="")


def _brief(exit: RankExit) -> RankExit:
    tail = tuple(line[:500] for line in exit.log_tail[-10:])
    return replace(exit, log_tail=tail, traceback=exit.traceback[-4096:])


# ---- events ----------------------------------------------------------------------------------------------------------

Folded = tuple[RecordedEvent, ...]  # oldest first


def fold(recorded: Folded, events: Iterable[Event], now: float) -> Folded:
    """Return the recorded events with new ones added: equal ones are counted."""
    folded = {(e.reason, e.message): e for e in recorded}
    for event in events:
        key = (event.reason, event.message[:MESSAGE_MAX])
        earlier = folded.pop(key, None)
        folded[key] = RecordedEvent(
            kind=event.kind,
            reason=event.reason,
            message=key[1],
            count=1 if earlier is None else earlier.count + 1,
            first_at=now if earlier is None else earlier.first_at,
            last_at=now if earlier is None else max(now, earlier.last_at),
            version=UNRESOLVED,
        )
    return tuple(folded.values())


def merged(one: Folded, other: Folded) -> Folded:
    """Return two records of one run as one, by time, as many as are kept."""
    both: dict[tuple[str, str], RecordedEvent] = {}
    for event in (*one, *other):
        key = (event.reason, event.message)
        known = both.pop(key, None)
        both[key] = event if known is None else _joined(*sorted((known, event), key=lambda e: e.version))
    ordered = sorted(both.values(), key=lambda event: event.last_at)  # stable: ties stay in their order
    return _newest(ordered, EVENTS_KEPT)


def _joined(earlier: RecordedEvent, later: RecordedEvent) -> RecordedEvent:
    return replace(
        later,
        count=earlier.count + later.count,
        first_at=earlier.first_at,
        last_at=max(earlier.last_at, later.last_at),
    )


def _newest(ordered: Iterable[RecordedEvent], limit: int) -> Folded:
    ordered = list(ordered)
    excess = max(0, len(ordered) - limit)
    oldest = {id(event) for event in [e for e in ordered if e.reason != Reason.CREATED][:excess]}
    return tuple(event for event in ordered if id(event) not in oldest)


def resolved(events: Folded, version: int, earlier: Folded) -> Folded:
    """Return each event with the version that it was first seen with, which is this one if never."""
    known = {(e.reason, e.message, e.count): e.version for e in earlier}
    return tuple(
        event
        if event.version != UNRESOLVED
        else replace(event, version=known.get((event.reason, event.message, event.count), version))
        for event in events
    )


def events_text(events: Iterable[RecordedEvent], limit: int, size: int) -> str:
    """Encode as many of the newest as fit, `Created` in any case."""
    kept = _newest(events, limit)
    while True:
        rows = [[e.kind, e.reason, e.message, e.count, e.first_at, e.last_at, e.version] for e in kept]
        text = pack(json.dumps(rows, separators=(",", ":")))
        if len(text) <= size or len(kept) <= 1:
            return text
        kept = _newest(kept, len(kept) * 3 // 4)


def events_of(instance: str, text: str) -> Folded:
    try:
        rows = json.loads(unpack(text)) if text else []
        return tuple(
            RecordedEvent(
                kind=str(kind),
                reason=str(reason),
                message=str(message),
                count=int(count),
                first_at=float(first),
                last_at=float(last),
                version=int(version),
            )
            for kind, reason, message, count, first, last, version in rows
        )
    except (ValueError, TypeError, zlib.error) as error:
        raise StoreUnavailable(f"the stored events of {instance} cannot be read: {error}") from None
