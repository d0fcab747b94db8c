"""The operations of the SDK, one generator each: their requests, their retries, and the meaning of the answers.

Requests that fail transiently (no connection, 429, 502, 503, 504) are retried within the caller's time, and reads that
meet an internal error of the server are retried a few times. A network blip never ends a run: no flow deletes a run
that it cannot reach.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from basilica.client.effects import Answer, Call, Emit, Flow, Lines, NextLine, NoAnswer, Now, Sleep, T
from basilica.client.problems import TRANSIENT, error_of, retry_after
from basilica.client.views import (
    BenchStatus,
    Checkpoint,
    Event,
    RunView,
    Series,
    parse_checkpoint,
    parse_event,
    parse_run,
    parse_series,
    parse_summary,
)
from basilica.core import waits
from basilica.core.damage import DAMAGED
from basilica.core.errors import (
    BadResult,
    BelowMinimumWorld,
    Conflict,
    DeploymentNotFound,
    NetworkError,
    RateLimitError,
    ServerError,
    UDTerminalState,
    WorldSizeOutOfBounds,
)
from basilica.core.world import WorldStatus

PATIENCE = 30.0  # how long a call that has no timeout of its own is retried
FIRST_DELAY = 0.1
LONGEST_DELAY = 5.0
LONG_POLL = 30.0  # how long one watch request stays open
NOTICE = 5.0  # how long a server may be silent before the watcher is notified
LAST_POLL = 2.0  # how long the poll at a deadline may take: a wait of 0 s polls once
READ_TRIES = 3  # how many internal errors of the server in a row a read may meet
FIRST_POLL = 0.5  # against a server that cannot be watched
LONGEST_POLL = 5.0
NEVER = float("inf")
Check = Callable[[waits.Snapshot], None]


@dataclass(slots=True)
class Remembered:
    """The state of a handle: its last answer, and the target that it requested from a server without generations."""

    name: str
    view: RunView | None = None
    requested_target: int | None = None

    @property
    def path(self) -> str:
        if self.name in ("", ".", ".."):  # in a URL these have another meaning
            raise DeploymentNotFound(self.name)
        return f"/deployments/{quote(self.name, safe='')}"

    def take(self, view: RunView) -> RunView:
        self.view, self.name = view, view.instance
        return view

    def snapshot(self, view: RunView) -> waits.Snapshot:
        return view.snapshot(self.requested_target)


# ---- requests ----------------------------------------------------------------------------------------------------


def ask(call: Call, *, name: str = "", patience: float | None = None) -> Flow[Answer]:
    """Send a request, and retry it after transient failures within `patience` seconds. Errors are raised by type.

    The caller's patience bounds each request too, so that a silent server cannot make it wait longer.
    """
    deadline = (yield Now()) + (PATIENCE if patience is None else patience)
    delay, tries = FIRST_DELAY, 0
    while True:
        if patience is not None:
            left = max(LAST_POLL, deadline - (yield Now()))
            call = replace(call, timeout=min(call.timeout, left), total=left)
        answer: Answer | NoAnswer = yield call
        if isinstance(answer, Answer) and answer.status < 400:
            return answer
        failure = NetworkError(answer.problem) if isinstance(answer, NoAnswer) else error_of(answer, name)
        left, tries = deadline - (yield Now()), tries + 1
        if left <= 0 or not (_may_pass(answer) or (call.method == "GET" and _internal(failure) and tries < READ_TRIES)):
            raise failure
        wanted = retry_after(answer) if isinstance(answer, Answer) else None
        yield Sleep(min(left, delay if wanted is None else max(delay, wanted)), jitter=wanted is None)
        delay = min(delay * 2, LONGEST_DELAY)


def once(call: Call, name: str = "") -> Flow[Answer]:
    """Send a request without retries, within its own timeout."""
    answer: Answer | NoAnswer = yield call
    if isinstance(answer, NoAnswer):
        raise NetworkError(answer.problem)
    if answer.status >= 400:
        raise error_of(answer, name)
    return answer


def _may_pass(answer: Answer | NoAnswer) -> bool:
    return isinstance(answer, NoAnswer) or answer.status in TRANSIENT


def _internal(error: Exception) -> bool:
    """Return whether the error is internal to the server, and may not repeat."""
    return isinstance(error, ServerError) and error.status >= 500


def fetch(run: Remembered, patience: float | None = None) -> Flow[RunView]:
    answer = yield from ask(Call(method="GET", path=run.path), name=run.name, patience=patience)
    view = answer.parsed(parse_run)
    if view.phase == DAMAGED:  # its waits and its end are unknown
        raise Conflict(view.message)
    return run.take(view)


def list_runs() -> Flow[list[RunView]]:
    answer = yield from ask(Call(method="GET", path="/deployments"))
    return answer.parsed(lambda body: [parse_summary(row) for row in body["deployments"]])


def prune(older_than: float) -> Flow[list[str]]:
    answer = yield from ask(Call(method="POST", path="/prune", params={"older_than": older_than}))
    return answer.parsed(lambda body: [str(name) for name in body["deleted"]])


def post(run: Remembered, action: str, body: object = None) -> Flow[RunView]:
    call = Call(method="POST", path=f"{run.path}/{action}", body={} if body is None else body)
    answer = yield from ask(call, name=run.name)
    return run.take(answer.parsed(parse_run))


# ---- making and ending -------------------------------------------------------------------------------------------


def create(request: Mapping[str, Any], idempotency_key: str) -> Flow[Remembered]:
    """Create a run. A retry creates no second run: the server knows the request by its key."""
    headers = {"Idempotency-Key": idempotency_key}
    call = Call(method="POST", path="/deployments", body=dict(request), headers=headers, timeout=60)
    answer = yield from ask(call, name=str(request.get("instanceName", "")))
    view = answer.parsed(parse_run)
    return Remembered(view.instance, view)


def scale(run: Remembered, target: int) -> Flow[WorldStatus]:
    """Change the target. An invalid one is refused by the live status, before anything is changed."""
    view = yield from fetch(run)
    world = view.world
    if view.is_terminal:
        raise UDTerminalState(view.phase, target, view.name)
    if target < 1 or not world.min <= target <= world.max:
        raise WorldSizeOutOfBounds(target, world.min, world.max)
    view = yield from post(run, "scale-distributed", {"target": target})
    if not view.tells_changes:
        run.requested_target = target
    return WorldStatus(view.world.ready, target, world.min, world.max, view.world.below_minimum)


def cancel(run: Remembered) -> Flow[RunView]:
    """Cancel the run; return its end once the controller has recorded it. Ranks may still be in their grace period."""
    view = yield from post(run, "cancel")
    deadline = (yield Now()) + PATIENCE
    while not view.is_terminal and view.tells_changes and (left := deadline - (yield Now())) > 0:
        view = yield from _next_state(run, view, left)
    return view


def leave(run: Remembered, delete_wait: float, *, remove: bool) -> Flow[None]:
    """End a `with` block: cancel the run, or delete it with `remove` or where the server cannot cancel."""
    if not remove:
        try:
            yield from cancel(run)
            return
        except DeploymentNotFound:  # a server without that route answers 404 as well
            pass
        except ServerError as error:
            if error.status not in (405, 501):
                raise
    yield from delete(run, delete_wait)


def delete(run: Remembered, wait: float) -> Flow[None]:
    """Delete the run. A run that is gone already is no error."""
    call = Call(method="DELETE", path=run.path, params={"wait": wait}, timeout=wait + 30)
    try:
        yield from ask(call, name=run.name)
    except DeploymentNotFound:
        return


# ---- waiting -----------------------------------------------------------------------------------------------------


def wait(run: Remembered, rule: waits.Rule, timeout: float | None, *, at_entry: Check | None = None) -> Flow[RunView]:
    """Return the first state that satisfies the rule; poll at least once, and once more at the deadline.

    `at_entry` may refuse the first state.
    """
    limit = NEVER if timeout is None else max(0.0, timeout)
    deadline = (yield Now()) + limit
    view = yield from fetch(run, limit)
    try:
        if at_entry is not None:
            at_entry(run.snapshot(view))
        pause = FIRST_POLL
        while not rule(run.snapshot(view), limit):
            left = deadline - (yield Now())
            if left <= 0:
                raise waits.timed_out(run.snapshot(view), limit, rule=rule)
            if view.tells_changes:
                view = yield from _next_state(run, view, left)
            else:
                yield Sleep(min(pause, left))
                pause = min(pause * 1.5, LONGEST_POLL)
                view = yield from _poll(run, view, deadline)
        if rule is waits.target_world:
            run.requested_target = None
    finally:
        if view.is_terminal:  # only now: the error of a lost run names the requested target
            run.requested_target = None
    return view


def wait_complete(run: Remembered, timeout: float) -> Flow[RunView]:
    """As `wait`, but a run that is over at entry is `UDTerminalState`."""
    return (yield from wait(run, waits.complete, timeout, at_entry=waits.refuse_ended))


def wait_bench(run: Remembered, timeout: float) -> Flow[BenchStatus | None]:
    try:
        view = yield from wait(run, waits.bench_complete, timeout)
    except BelowMinimumWorld:  # the rule itself never raises: the time is up
        raise TimeoutError(f"the bench of {run.name!r} has not ended within {timeout:g} s") from None
    return view.bench


def changes(run: Remembered, *, reports: bool = False) -> Flow[None]:
    """Emit the run as it is, and again after each change, until it is settled.

    With `reports`, also while ranks report, about once a second. While the server does not answer, emit the `NoAnswer`
    now and then: the run itself goes on.
    """
    view = yield from fetch(run)
    yield Emit(view)
    pause, lost, notified, internal_errors = FIRST_POLL, False, False, 0
    while not (view.settled or (view.is_terminal and not view.tells_changes)):
        try:
            if view.tells_changes and not lost:
                params = {"since": view.version, "wait": f"{LONG_POLL:g}"}
                if reports:
                    known = view.reported_at
                    params["reported_since"] = "0" if known is None else f"{known.timestamp():.3f}"
                call = Call(method="GET", path=f"{run.path}/watch", params=params, timeout=LONG_POLL + 15)
                newer = (yield from once(call, run.name)).parsed(parse_run)
            else:
                if not lost:
                    yield Sleep(pause)
                    pause = min(pause * 1.5, LONGEST_POLL)
                newer = yield from fetch(run, NOTICE)
        except (NetworkError, ServerError, RateLimitError) as error:
            internal_errors = internal_errors + 1 if _internal(error) else 0
            final = isinstance(error, ServerError) and error.status not in TRANSIENT
            if final and (not _internal(error) or internal_errors >= READ_TRIES):
                raise
            if lost:
                notified = True
                yield Emit(NoAnswer(str(error), sent=False))
            lost = True
            continue
        news = newer.version != view.version if view.tells_changes else newer != view
        news = news or (reports and newer.reported_at != view.reported_at)
        if news or notified:
            view = run.take(newer)
            yield Emit(view)
        lost, notified, internal_errors = False, False, 0


def _next_state(run: Remembered, seen: RunView, left: float) -> Flow[RunView]:
    """Long-poll the server, which answers when the run has changed, or when the time is up."""
    hold = min(left, LONG_POLL)
    params = {"since": seen.version, "wait": f"{hold:.3f}"}
    call = Call(method="GET", path=f"{run.path}/watch", params=params, timeout=hold + 15)
    try:
        answer = yield from ask(call, name=run.name, patience=left + LAST_POLL)
    except NetworkError:
        return seen  # the caller's deadline decides
    return run.take(answer.parsed(parse_run))


def _poll(run: Remembered, seen: RunView, deadline: float) -> Flow[RunView]:
    left = deadline - (yield Now())
    try:
        return (yield from fetch(run, max(0.0, left)))
    except NetworkError:
        return seen


# ---- reading -----------------------------------------------------------------------------------------------------


def events(run: Remembered, since: int = 0, limit: int | None = None) -> Flow[list[Event]]:
    call = Call(method="GET", path=f"{run.path}/events", params={"since": since or None, "limit": limit})
    answer = yield from ask(call, name=run.name)
    return answer.parsed(lambda body: [parse_event(e) for e in body["events"]])


def series(
    run: Remembered, metric: str | None, rank: int | None, points: int | None, since: float | None
) -> Flow[list[Series]]:
    params = {"metric": metric, "rank": rank, "points": points, "since": since}
    answer = yield from ask(Call(method="GET", path=f"{run.path}/series", params=params), name=run.name)
    return answer.parsed(lambda body: [parse_series(s) for s in body["series"]])


def checkpoints(run: Remembered) -> Flow[list[Checkpoint] | None]:
    """Return the snapshots of the run by step and tier; None if the server cannot read them."""
    answer = yield from ask(Call(method="GET", path=f"{run.path}/checkpoints"), name=run.name)
    return answer.parsed(lambda body: [parse_checkpoint(c) for c in body["checkpoints"]] if body["known"] else None)


def rerun(run: Remembered, *, resume: bool) -> Flow[RunView]:
    """Start a new run like this one; with `resume`, from its progress."""
    params = {"resume": "true"} if resume else {}
    answer = yield from ask(Call(method="POST", path=f"{run.path}/rerun", params=params, body={}), name=run.name)
    return run.take(answer.parsed(parse_run))


def why(run: Remembered) -> Flow[str]:
    answer = yield from ask(Call(method="GET", path=f"{run.path}/why"), name=run.name)
    return answer.parsed(lambda body: str(body["why"]))


def logs(run: Remembered, ranks: Sequence[int] | None, tail: int | None) -> Flow[str]:
    params = {"rank": list(ranks) if ranks is not None else None, "tail": tail}
    answer = yield from ask(Call(method="GET", path=f"{run.path}/logs", params=params), name=run.name)
    return answer.content.decode("utf-8", "replace")


def stream_logs(run: Remembered, ranks: Sequence[int] | None, tail: int | None, *, follow: bool = True) -> Flow[None]:
    """Emit (rank, line) as they are written, until the run has ended, or without `follow` the lines so far.

    A broken connection is resumed where it broke.
    """
    cursors: dict[int, str] = {}
    since: Counter[int] = Counter()  # lines received after each rank's cursor: the server repeats them after a break
    delay = FIRST_DELAY
    while True:
        again, since = since, Counter()
        params = {
            "rank": list(ranks) if ranks is not None else None,
            "follow": "true" if follow else None,
            "tail": tail,
            "since": ",".join(cursors.values()) or None,
        }
        accept = {"Accept": "application/x-ndjson"}
        opened = yield Lines(Call(method="GET", path=f"{run.path}/logs", params=params, headers=accept))
        if isinstance(opened, Answer) and opened.status >= 400 and opened.status not in TRANSIENT:
            raise error_of(opened, run.name)
        broken = not isinstance(opened, Answer) or opened.status >= 400
        while not broken:
            line = yield NextLine()
            if line is None:
                return
            if isinstance(line, NoAnswer):
                broken = True
            elif line:
                rank, text, cursor = _parsed_line(line, lambda e: (int(e["rank"]), str(e["line"]), e.get("cursor")))
                delay = FIRST_DELAY
                since[rank] += 1
                if since[rank] > again[rank]:
                    yield Emit((rank, text))
                if cursor is not None:
                    cursors[rank] = str(cursor)
                    since[rank] = again[rank] = 0
        yield Sleep(delay, jitter=True)
        delay = min(delay * 2, LONGEST_DELAY)


def results(run: Remembered, timeout: float | None) -> Flow[dict[int, Any]]:
    """Return the results of the shipped function by rank; the run must have succeeded."""
    deadline = None if timeout is None else (yield Now()) + timeout
    yield from wait(run, waits.complete, timeout)
    return (yield from results_so_far(run, None if deadline is None else max(0.0, deadline - (yield Now()))))


def results_so_far(run: Remembered, patience: float | None = None) -> Flow[dict[int, Any]]:
    """Return the results so far by rank, whatever became of the other ranks."""
    call = Call(method="GET", path=f"{run.path}/results")
    answer = yield from ask(call, name=run.name, patience=patience)
    return answer.parsed(_results)


def _results(body: Any) -> dict[int, Any]:
    problems = {int(rank): BadResult(int(rank), problem) for rank, problem in (body.get("problems") or {}).items()}
    return dict(sorted(({int(rank): value for rank, value in body["results"].items()} | problems).items()))


def execute(run: Remembered, command: Sequence[str], rank: int) -> Flow[None]:
    """Emit the output of a command beside a rank as (stream, text), then its exit code.

    The request is never retried: the command may have run. A caller that stops reading ends the command.
    """
    call = Call(method="POST", path=f"{run.path}/exec", body={"rank": rank, "command": list(command)})
    opened: Answer | NoAnswer = yield Lines(call)
    if isinstance(opened, NoAnswer):
        raise NetworkError(opened.problem)
    if opened.status >= 400:
        raise error_of(opened, run.name)
    while True:
        line: str | NoAnswer | None = yield NextLine()
        if not isinstance(line, str):
            raise NetworkError("the connection broke before the command had ended")
        emitted = _parsed_line(line, lambda e: int(e["exitCode"]) if "exitCode" in e else (e["stream"], e["text"]))
        yield Emit(emitted)
        if isinstance(emitted, int):
            return


def _parsed_line(line: str, parse: Callable[[Any], T]) -> T:
    """Parse one line of a stream of JSON by the same rule as a whole answer."""
    return Answer(200, {}, line.encode()).parsed(parse)
