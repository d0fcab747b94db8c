"""The lines of one rank over all its attempts: the last ones, and as they come."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable

from basilica.ports import LogChunk
from basilica.runtimes.local.attempts import has_ended
from basilica.runtimes.local.inotify import FileWatcher
from basilica.runtimes.local.layout import Key, Layout
from basilica.runtimes.local.logs import LINES_ALL, Cursor, find_tail, read_on, read_tail


def tail_rank(layout: Layout, instance: str, rank: int, lines: int | None) -> LogChunk:
    """The last lines; `lines` None: all that is kept."""
    wanted = LINES_ALL if lines is None else lines
    collected: tuple[str, ...] = ()
    cursor: Cursor | None = None
    for attempt in reversed(layout.attempts(instance, rank)):
        key = Key(instance, rank, attempt)
        ended = has_ended(layout, key)  # asked before reading: what is read then is all there will be
        tail = read_tail(layout.log(key), wanted - len(collected), ended=ended)
        collected = tail.lines + collected
        cursor = cursor or Cursor(attempt, tail.offset)
        if len(collected) >= wanted:
            break
    return LogChunk(rank, collected, str(cursor or Cursor()))


def tail_cursor(layout: Layout, instance: str, rank: int, lines: int) -> str:
    """The cursor before the last lines, found without keeping them."""
    cursor = Cursor()
    for attempt in reversed(layout.attempts(instance, rank)):
        key = Key(instance, rank, attempt)
        found = find_tail(layout.log(key), lines, ended=has_ended(layout, key))
        cursor = Cursor(attempt, found.offset)
        lines -= found.lines
        if lines <= 0:
            break
    return str(cursor)


async def follow_rank(
    layout: Layout, instance: str, rank: int, cursor: str | None, *, files: FileWatcher, changed: asyncio.Event
) -> AsyncGenerator[LogChunk, None]:
    """Lines from the cursor as they come. `changed` is set when ranks of the run start or end."""
    at = Cursor() if cursor is None else Cursor.parse(cursor)
    watched: tuple[int, Callable[[], None]] | None = None  # the attempt whose log is watched, and how to end that
    try:
        while True:
            changed.clear()
            key = Key(instance, rank, at.attempt)
            log = layout.log(key)
            ended = has_ended(layout, key)
            if not ended and (watched is None or watched[0] != at.attempt):
                if watched is not None:
                    watched[1]()
                watched = _watch(files, key, log, changed)
            lines = read_on(log, at.offset, ended=ended)
            at = Cursor(at.attempt, lines.offset)
            if lines.lines:
                yield LogChunk(rank, lines.lines, str(at))
                continue
            if ended or watched is None:
                later = next((a for a in layout.attempts(instance, rank) if a > at.attempt), None)
                if later is not None:
                    at = Cursor(later, 0)
                    continue
            yield LogChunk(rank, (), str(at))
            await changed.wait()
    finally:
        if watched is not None:
            watched[1]()


def _watch(files: FileWatcher, key: Key, log: str, changed: asyncio.Event) -> tuple[int, Callable[[], None]] | None:
    """Watch the log, if there is one yet: the start of the attempt is told of by `changed` as well."""
    return (key.attempt, files.watch(log, changed.set)) if os.path.exists(log) else None
