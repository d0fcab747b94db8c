"""The activity of a rank in the run's keyspace: the value of `/basilica/activity/<rank>`, which its agent writes. Pure.

    {"attempt": 1, "agent": {…} | null, "progress": {…} | null, "answer": {…} | null, "saving": {…} | null,
     "leaving": {…} | null}

The parts have the fields of `core.seen`. A rank can write to the keyspace of its run too, so a value may contain
anything: a part that the agent cannot have written is None, and a value that is too long or names no attempt is none.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from basilica.core.seen import (
    AnswerState,
    Leaving,
    SeenAgent,
    SeenAnswer,
    SeenProgress,
    SeenRefusal,
    SeenRestore,
    SeenSaved,
    SeenSaving,
    SeenWorkerExit,
)
from basilica.progress.activity import EXITS_SHOWN, NOTHING, REFUSALS_SHOWN, Activity
from basilica.progress.note_file import REFUSAL_CHARS, SIZE_MAX, TIER_CHARS, TIERS_MAX
from basilica.rendezvous.names import ACTIVITY
from basilica.reports.points import STEP_MAX, TIME_MAX

VALUE_BYTES_MAX = 32 << 10
NUMBER_MAX = 1 << 31
WORKERS_MAX = 1024
REASON_CHARS, TEXT_CHARS, TAIL_LINES_MAX = 500, 4000, 32
WORD_CHARS = 64

_FOREIGN = (KeyError, TypeError, ValueError, OverflowError, RecursionError)  # what a part of another form raises

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedActivity:
    """The activity of one attempt. `leaving`: the platform has told the rank's container to end."""

    attempt: int
    activity: Activity = NOTHING
    leaving: Leaving | None = None

    def is_same_but_for_steps(self, other: "PublishedActivity | None") -> bool:
        """Whether the two differ at most in steps and snapshots of a process that had reported steps before."""
        return other is not None and self._without_steps() == other._without_steps()

    def _without_steps(self) -> "PublishedActivity":
        progress, saving = self.activity.progress, self.activity.saving
        if progress is not None:
            progress = replace(progress, at=0.0, step=0, step_seconds=None)
        if saving is not None:
            saving = replace(saving, at=0.0, blocked_seconds=0.0, snapshots=0, every=None, saved=())
        return replace(self, activity=replace(self.activity, progress=progress, saving=saving))


def activity_key(rank: int) -> str:
    return f"{ACTIVITY}/{rank}"


# ---- encoding ------------------------------------------------------------------------------------------------------


def encode(published: PublishedActivity) -> str:
    """Return the value. One that would be too long has the details of fewer failed workers, the others' last."""
    for found in _ever_shorter(published):
        text = json.dumps(_fields(found), ensure_ascii=False, separators=(",", ":"))
        if len(text.encode(errors="replace")) < VALUE_BYTES_MAX:
            return text
    return json.dumps({"attempt": published.attempt})


def _fields(published: PublishedActivity) -> dict[str, Any]:
    parts = asdict(published.activity)
    leaving = None if published.leaving is None else asdict(published.leaving)
    return {"attempt": published.attempt, **parts, "leaving": leaving}


def _ever_shorter(published: PublishedActivity) -> Iterator[PublishedActivity]:
    yield published
    agent = published.activity.agent
    if agent is None:
        return
    # Failures of workers that had a cause of their own come before the echoes of lost peers, and the last ones first.
    by_worth = sorted(agent.exits, key=lambda each: (each.echo or each.exit_code == 0, -each.number))
    for count in range(len(by_worth) - 1, -1, -1):
        detailed = {each.number for each in by_worth[:count]}
        exits = tuple(each if each.number in detailed else _plain(each) for each in agent.exits)
        yield _with_agent(published, replace(agent, exits=exits))
    yield _with_agent(published, replace(agent, exits=(), pids=()))


def _plain(exit: SeenWorkerExit) -> SeenWorkerExit:
    return replace(exit, message=exit.message[:WORD_CHARS], traceback="", log_tail=())


def _with_agent(published: PublishedActivity, agent: SeenAgent) -> PublishedActivity:
    return replace(published, activity=replace(published.activity, agent=agent))


# ---- parsing -------------------------------------------------------------------------------------------------------


def parse(text: str) -> PublishedActivity | None:
    """Parse a value; None if it is none."""
    try:
        if len(text) > VALUE_BYTES_MAX:
            return None
        found = json.loads(text)
        attempt = _count(found["attempt"])
    except _FOREIGN:
        return None
    return PublishedActivity(
        attempt=attempt,
        activity=Activity(
            agent=_part(found, "agent", _agent),
            progress=_part(found, "progress", _progress),
            answer=_part(found, "answer", _answer),
            saving=_part(found, "saving", _saving),
        ),
        leaving=_part(found, "leaving", _leaving),
    )


def _part(found: dict[str, Any], name: str, parse_part: Callable[[Any], Part]) -> Part | None:
    try:
        return None if found.get(name) is None else parse_part(found[name])
    except _FOREIGN:
        return None


def _agent(found: Any) -> SeenAgent:
    return SeenAgent(
        pid=_count(found["pid"]),
        nproc=_count(found["nproc"]),
        round=_count(found["round"]),
        group_rank=_count(found["group_rank"]),
        agents=_count(found["agents"]),
        world=_count(found["world"]),
        first_torch_rank=_count(found["first_torch_rank"]),
        pids=tuple(_count(pid) for pid in _list(found["pids"], WORKERS_MAX)),
        meeting_since=_maybe(found["meeting_since"], _time),
        executing_since=_maybe(found["executing_since"], _time),
        exits=_exits(found["exits"]),
    )


def _exits(found: Any) -> tuple[SeenWorkerExit, ...]:
    """Return the exits in the order of their numbers, each number once."""
    exits = {exit.number: exit for exit in map(_exit, _list(found, EXITS_SHOWN))}
    return tuple(exits[number] for number in sorted(exits))


def _exit(found: Any) -> SeenWorkerExit:
    return SeenWorkerExit(
        number=_count(found["number"]),
        worker=_count(found["worker"]),
        torch_rank=_count(found["torch_rank"]),
        pid=_count(found["pid"]),
        exit_code=_count(found["exit_code"]),
        reason=_text(found["reason"], WORD_CHARS),
        at=_time(found["at"]),
        signal=_maybe(found["signal"], lambda word: _text(word, WORD_CHARS)),
        echo=_bool(found["echo"]),
        message=_text(found["message"], TEXT_CHARS),
        traceback=_text(found["traceback"], TEXT_CHARS),
        log_tail=tuple(_text(line, REASON_CHARS) for line in _list(found["log_tail"], TAIL_LINES_MAX)),
    )


def _progress(found: Any) -> SeenProgress:
    return SeenProgress(
        first_at=_time(found["first_at"]),
        first_step=_step(found["first_step"]),
        at=_time(found["at"]),
        step=_step(found["step"]),
        step_seconds=_maybe(found["step_seconds"], _time),
    )


def _answer(found: Any) -> SeenAnswer:
    return SeenAnswer(
        state=AnswerState(found["state"]),
        number=_count(found["number"]),
        step=_maybe(found["step"], _step),
        at=_time(found["at"]),
    )


def _saving(found: Any) -> SeenSaving:
    return SeenSaving(
        process_at=_time(found["process_at"]),
        at=_time(found["at"]),
        restoring_since=_maybe(found["restoring_since"], _time),
        restored=_maybe(found["restored"], _restored),
        blocked_seconds=_time(found["blocked_seconds"]),
        snapshots=_step(found["snapshots"]),
        every=_maybe(found["every"], _step),
        saved=tuple(_saved(each) for each in _list(found["saved"], TIERS_MAX)),
        refusals=tuple(_refusal(each) for each in _list(found["refusals"], REFUSALS_SHOWN)),
    )


def _restored(found: Any) -> SeenRestore:
    return SeenRestore(
        step=_maybe(found["step"], _step),
        tier=_text(found["tier"], TIER_CHARS),
        seconds=_time(found["seconds"]),
        began_at=_time(found["began_at"]),
        at=_time(found["at"]),
    )


def _saved(found: Any) -> SeenSaved:
    size = found["size"]
    if type(size) is not int or not 0 <= size < SIZE_MAX:
        raise ValueError(size)
    return SeenSaved(tier=_text(found["tier"], TIER_CHARS), step=_step(found["step"]), size=size, at=_time(found["at"]))


def _refusal(found: Any) -> SeenRefusal:
    what = "".join(char if char.isprintable() else " " for char in _text(found["what"], REFUSAL_CHARS))
    return SeenRefusal(pid=_count(found["pid"]), number=_step(found["number"]), what=what)


def _leaving(found: Any) -> Leaving:
    kind = found["kind"]
    if kind not in ("preemption", "drain"):
        raise ValueError(kind)
    return Leaving(kind=kind, until=_time(found["until"]), reason=_text(found["reason"], REASON_CHARS))


def _maybe(found: Any, parse_value: Callable[[Any], Part]) -> Part | None:
    return None if found is None else parse_value(found)


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < NUMBER_MAX:
        raise ValueError(found)
    return found


def _step(found: Any) -> int:
    if type(found) is not int or not -STEP_MAX < found < STEP_MAX:
        raise ValueError(found)
    return found


def _time(found: Any) -> float:
    if type(found) not in (int, float) or not (math.isfinite(found) and 0 <= found < TIME_MAX):
        raise ValueError(found)
    return float(found)


def _bool(found: Any) -> bool:
    if type(found) is not bool:
        raise TypeError(found)
    return found


def _list(found: Any, most: int) -> list[Any]:
    if type(found) is not list or len(found) > most:
        raise TypeError(type(found))
    return found


def _text(found: Any, most: int) -> str:
    """Return a text that can be stored: half a surrogate pair cannot."""
    if type(found) is not str:
        raise TypeError(type(found))
    return found[:most].encode("utf-8", "replace").decode()
