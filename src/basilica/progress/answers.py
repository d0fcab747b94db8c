"""The answers of ranks to notices, as the control plane reads them: one file for each process that listens.

A rank can write anything to these files. They are opened through `machine.files`, and what is no answer is dropped, as
is the answer of a process that has ended. The answers of the others are merged into one for each attempt.

A listener that has passed the step of a notice without having read it may be blocked in the next step, by another one
that is ready and waits. It cannot answer then. So a notice for which some are ready while others have not seen it has
to be published again with a later step; with a number of its own, so that answers to the earlier one are not taken for
answers to it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from basilica.machine import files as door
from basilica.machine.layout import Key, Layout
from basilica.machine.processes import lives
from basilica.progress.formats import ANSWER_BYTES, ANSWER_SUFFIX, STATES, AnswerLine, State, parse_answer
from basilica.reports.writer import FILES_MAX

READ_TRIES = 5
LISTENERS_MAX = 2 * FILES_MAX  # of an attempt: an honest program has as many as it has workers

_NAME = re.compile(rf"([0-9]{{1,9}})\.([0-9]{{1,9}})\.([0-9]{{1,9}}){re.escape(ANSWER_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an attempt. `listening` counts its processes that live and listen, and is at least 1.

    `ready` and `seen` hold for all of them and for the notice `number`; `late` for at least one. `step` is the greatest
    that any of them had reported when it answered, and `mono` the monotonic time of the last answer.
    """

    listening: int
    number: int
    state: State
    step: int | None
    mono: float = field(default=0.0, compare=False)


def read_answers(layout: Layout, instance: str) -> dict[Key, Answer]:
    """Return the answers of a run, by attempt. Attempts of which no process listens have none."""
    return _read(layout, instance, _NAME)


def read_answer_of(layout: Layout, key: Key) -> Answer | None:
    """Return the answer of one attempt; None if none of its processes listens."""
    name = re.compile(rf"({key.rank})\.({key.attempt})\.([0-9]{{1,9}}){re.escape(ANSWER_SUFFIX)}")
    return _read(layout, key.instance, name).get(key)


def _read(layout: Layout, instance: str, wanted: re.Pattern[str]) -> dict[Key, Answer]:
    try:
        names = door.names(str(layout.reports(instance)), keep=lambda name: wanted.fullmatch(name) is not None)
    except OSError:  # no directory yet, or the rank put another file in its place
        return {}
    pids: defaultdict[Key, list[int]] = defaultdict(list)
    for match in filter(None, map(wanted.fullmatch, names)):
        pids[Key(instance, int(match[1]), int(match[2]))].append(int(match[3]))
    answers = {
        key: merge(filter(None, (_line(layout, key, pid) for pid in found)))
        for key, found in pids.items()
        if len(found) <= LISTENERS_MAX
    }
    return {key: answer for key, answer in answers.items() if answer is not None}


def _line(layout: Layout, key: Key, pid: int) -> AnswerLine | None:
    """Return the answer of a process that lives. It may be written meanwhile: two equal reads are one answer."""
    before = b""
    try:
        with door.opened(f"{layout.report(key)}.{pid}{ANSWER_SUFFIX}") as fd:
            for _ in range(READ_TRIES):
                data = door.read_at(fd, 0, ANSWER_BYTES + 1)
                if data == before:
                    break
                before = data
            else:
                return None
    except OSError:
        return None
    line = parse_answer(data)
    return line if line is not None and line.pid == pid and lives(pid, line.start) else None


def merge(lines: Iterable[AnswerLine]) -> Answer | None:
    """Merge the answers of the processes of an attempt; None if there are none.

    A late process is late for the newest notice, or has not read that yet. Otherwise the attempt is as far as the last
    of its processes: where they have read different notices, none of them is ready for both.
    """
    found = list(lines)
    if not found:
        return None
    step = max((line.step for line in found if line.step is not None), default=None)
    mono = max(line.mono for line in found)
    newest, oldest = max(line.number for line in found), min(line.number for line in found)
    if any(line.state == "late" and line.number == newest for line in found):
        return Answer(len(found), newest, "late", step, mono)
    last = min((line for line in found if line.number == oldest), key=lambda line: STATES.index(line.state)).state
    if newest != oldest and last in ("ready", "late"):
        last = "seen"
    return Answer(len(found), oldest, last, step, mono)
