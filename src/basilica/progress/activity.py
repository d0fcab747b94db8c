"""The activity of a rank's program, by the files that its processes write: its agent's journal, steps, answers, notes.

The facts that the controller decides on are distilled here for every runtime. On one machine the server reads the
files, in a pod the rank's agent does and publishes the result. They are the rank's own and may contain anything.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from basilica.core.ends import COMPLETED, exit_code_of, killer_of, reason_of
from basilica.core.seen import (
    AnswerState,
    SeenAgent,
    SeenAnswer,
    SeenProgress,
    SeenRefusal,
    SeenRestore,
    SeenSaved,
    SeenSaving,
    SeenWorkerExit,
)
from basilica.machine import files as door
from basilica.machine.layout import Key, Layout
from basilica.machine.processes import lives
from basilica.progress.answers import read_answer_of
from basilica.progress.note_file import NOTE_FILE_BYTES, NOTE_SUFFIX, Note, parse_notes
from basilica.reports.agents import Journal, Meeting, RoundStarted, Stopped, WorkerExit, journal_file, read_journal
from basilica.reports.files import LastReport, read_last, report_file

EXITS_SHOWN = 32
REFUSALS_SHOWN = 16
READ_TRIES = 5
FILES_READ = 128  # of an attempt: more are not our writer's

Moment = Callable[[float], float]
"""Converts a monotonic time of this machine to the time line of the controller."""

_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})(\.agent|\.notice|\.progress)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What is known of a rank's program; a part is None where its processes have written nothing of it."""

    agent: SeenAgent | None = None
    progress: SeenProgress | None = None
    answer: SeenAnswer | None = None
    saving: SeenSaving | None = None


NOTHING = Activity()


def read_activities(layout: Layout, instance: str, keys: Iterable[Key], moment: Moment) -> dict[Key, Activity]:
    """Return the activity of these attempts of a run; its directory is read once."""
    wanted = set(keys)
    try:
        names = door.names(str(layout.reports(instance)), keep=lambda name: _NAME.fullmatch(name) is not None)
    except OSError:  # no directory yet, or the rank put another file in its place
        return dict.fromkeys(wanted, NOTHING)
    found: defaultdict[Key, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for match in filter(None, map(_NAME.fullmatch, names)):
        key = Key(instance, int(match[1]), int(match[2]))
        if key in wanted:
            found[key][match[4] or ""].append(int(match[3]))
    return {key: _read(layout, key, found[key], moment) if key in found else NOTHING for key in wanted}


def _read(layout: Layout, key: Key, pids: dict[str, list[int]], moment: Moment) -> Activity:
    journals = [read_journal(journal_file(layout, key, pid).path) for pid in pids.get(".agent", [])[:FILES_READ]]
    reports = [(pid, read_last(report_file(layout, key, pid))) for pid in pids.get("", [])[:FILES_READ]]
    return Activity(
        agent=seen_agent(newest_journal(each for each in journals if each is not None), moment),
        progress=seen_progress([(pid, each) for pid, each in reports if each is not None], moment),
        answer=seen_answer(layout, key, moment) if ".notice" in pids else None,
        saving=seen_saving(_notes(layout, key, pids.get(NOTE_SUFFIX, [])[:FILES_READ]), moment),
    )


# ---- agents --------------------------------------------------------------------------------------------------------


def newest_journal(journals: Iterable[Journal]) -> Journal | None:
    """Return the journal that was written last: a rank may run one torchrun after the other."""
    written = [journal for journal in journals if journal.events]
    return max(written, key=lambda journal: journal.events[-1].mono, default=None)


def seen_agent(journal: Journal | None, moment: Moment) -> SeenAgent | None:
    """Return the state of an agent after the events of its journal."""
    if journal is None:
        return None
    seen = SeenAgent(pid=journal.pid, nproc=journal.nproc)
    for event in journal.events:
        match event:
            case Meeting() | Stopped():
                since = seen.meeting_since if isinstance(event, Meeting) and seen.executing_since is None else None
                since = moment(event.mono) if since is None else since
                seen = replace(seen, meeting_since=since, executing_since=None)
            case RoundStarted():
                seen = _in_round(seen, event, moment(event.mono))
            case WorkerExit():
                seen = replace(seen, exits=(*seen.exits, _worker_exit(event, moment(event.mono)))[-EXITS_SHOWN:])
    return seen


def _in_round(seen: SeenAgent, event: RoundStarted, at: float) -> SeenAgent:
    return replace(
        seen,
        round=event.round,
        group_rank=event.group_rank,
        agents=event.agents,
        world=event.world,
        first_torch_rank=min((worker.torch_rank for worker in event.workers), default=0),
        pids=tuple(worker.pid for worker in event.workers),
        meeting_since=at if seen.meeting_since is None else seen.meeting_since,
        executing_since=at,
    )


def _worker_exit(event: WorkerExit, at: float) -> SeenWorkerExit:
    exit_code, killer = exit_code_of(event.code), killer_of(event.code)
    reason = COMPLETED if event.code == 0 else reason_of(exit_code, killer, memory_kills=event.memory_kills)
    return SeenWorkerExit(
        number=event.n,
        worker=event.worker,
        torch_rank=event.torch_rank,
        pid=event.pid,
        exit_code=exit_code,
        reason=reason,
        at=at,
        round=event.round,
        signal=killer,
        echo=event.kind == "echo",
        message=event.message,
        traceback=event.traceback.strip("\n"),
    )


# ---- steps and answers ---------------------------------------------------------------------------------------------


def seen_progress(reports: list[tuple[int, LastReport]], moment: Moment) -> SeenProgress | None:
    """Return the steps of the rank's present process: that of the lowest worker that reports, its newest."""
    stepping = [(pid, report) for pid, report in reports if report.last.step is not None and report.began]
    living = [(pid, report) for pid, report in stepping if lives(pid, report.start)]
    if not stepping:
        return None
    newest = max(stepping, key=lambda entry: entry[1].last.mono)
    _, report = min(living, key=lambda entry: (entry[1].worker, -entry[1].began)) if living else newest
    assert report.last.step is not None
    return SeenProgress(
        first_at=moment(report.began),
        first_step=report.last.step if report.first_step is None else report.first_step,
        at=moment(report.last.mono or report.began),
        step=report.last.step,
        step_seconds=report.last.usual,
    )


def seen_answer(layout: Layout, key: Key, moment: Moment) -> SeenAnswer | None:
    answer = read_answer_of(layout, key)
    if answer is None:
        return None
    state, at = AnswerState(answer.state), moment(answer.mono)
    return SeenAnswer(state=state, number=answer.number, step=answer.step, at=at)


# ---- notes -----------------------------------------------------------------------------------------------------------


def _notes(layout: Layout, key: Key, pids: list[int]) -> list[Note]:
    found = ((pid, _note(f"{layout.report(key)}.{pid}{NOTE_SUFFIX}")) for pid in pids)
    return [note for pid, note in found if note is not None and note.pid == pid]


def _note(path: str) -> Note | None:
    """Read a note file. Of its two slots at least one is whole at any time, but both may change during the read."""
    try:
        with door.opened(path) as fd:
            for _ in range(READ_TRIES):
                note = parse_notes(door.read_at(fd, 0, NOTE_FILE_BYTES + 1))
                if note is not None:
                    return note
    except OSError:
        pass
    return None


def seen_saving(notes: list[Note], moment: Moment) -> SeenSaving | None:
    """Return the notes of the rank's present process, chosen as `seen_progress` does; refusals are those of all."""
    if not notes:
        return None
    living = [note for note in notes if lives(note.pid, note.start)]
    newest = max(notes, key=lambda note: (note.at, note.mono))
    note = min(living, key=lambda each: (each.worker, -each.mono)) if living else newest
    restored = note.restored
    refusals = [
        SeenRefusal(pid=each.pid, number=number, what=what)
        for each in sorted(notes, key=lambda each: each.mono)
        for number, what in each.refused
    ]
    return SeenSaving(
        process_at=moment(note.mono),
        at=moment(note.at),
        restoring_since=None if note.restoring is None else moment(note.restoring),
        restored=None
        if restored is None
        else SeenRestore(
            step=restored.step,
            tier=restored.tier,
            seconds=restored.seconds,
            began_at=moment(restored.begin),
            at=moment(restored.end),
        ),
        blocked_seconds=note.blocked,
        snapshots=note.snapshots,
        every=note.every,
        saved=tuple(
            SeenSaved(tier=tier, step=saved.step, size=saved.size, at=moment(saved.at))
            for tier, saved in sorted(note.saved.items())
        ),
        refusals=tuple(refusals[-REFUSALS_SHOWN:]),
    )
