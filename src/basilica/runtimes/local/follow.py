"""The log lines of one rank over all its attempts: the last lines, and new lines as they are written.

Chunks are of bounded size, and the next is read once the last was consumed: a slow reader costs no memory. The threads
of a pool read the logs, never the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from basilica.machine import files as door
from basilica.machine.files import UnusableFile
from basilica.machine.inotify import FileWatcher
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.ports import LogChunk
from basilica.runtimes.local.attempts import has_ended
from basilica.runtimes.local.logs import (
    LINES_ALL,
    OFFSET_MAX,
    Cursor,
    Lines,
    Tail,
    find_tail,
    placeholder,
    read_on,
    read_tail,
)


def tail_rank(layout: Layout, instance: str, rank: int, lines: int | None) -> LogChunk:
    """Return the last lines in one chunk; `lines` None: all lines that are kept."""
    wanted = LINES_ALL if lines is None else lines
    collected: tuple[str, ...] = ()
    cursor: Cursor | None = None
    for attempt in reversed(layout.attempts(instance, rank)):
        key = Key(instance, rank, attempt)
        ended = _has_ended(layout, key)  # checked before reading: the lines read after an end are complete
        try:
            tail = read_tail(layout.log(key), wanted - len(collected), ended=ended)
        except UnusableFile as error:
            tail = Lines((placeholder(error),), OFFSET_MAX)
        collected = tail.lines + collected
        cursor = cursor or Cursor(attempt, tail.offset)
        if len(collected) >= wanted:
            break
    return LogChunk(rank, collected, str(cursor or Cursor()))


async def read_rank(
    layout: Layout, instance: str, rank: int, lines: int | None, *, pool: Pool
) -> AsyncGenerator[LogChunk, None]:
    """Yield the last lines in chunks, oldest first; lines written after the call has begun may be missing."""
    begin, last = await pool.run(_find_last, layout, instance, rank, lines)
    at: Cursor | None = begin
    while at is not None and at < last:
        step = await pool.run(_read, layout, instance, rank, at)
        at = step.at if step.lines else step.later
        if step.lines:
            yield LogChunk(rank, step.lines, str(step.at))


def tail_cursor(layout: Layout, instance: str, rank: int, lines: int) -> str:
    """Return the cursor before the last lines, which are counted, not kept in memory."""
    return str(_find_last(layout, instance, rank, lines)[0])


def _find_last(layout: Layout, instance: str, rank: int, lines: int | None) -> tuple[Cursor, Cursor]:
    """Return the cursors at the beginning and the end of the last lines."""
    left = LINES_ALL if lines is None else lines
    begin: Cursor | None = None
    last: Cursor | None = None
    for attempt in reversed(layout.attempts(instance, rank)):
        key = Key(instance, rank, attempt)
        ended = _has_ended(layout, key)
        try:
            found = find_tail(layout.log(key), left, ended=ended)
        except UnusableFile:
            found = Tail(0, 1, OFFSET_MAX)
        begin, last = Cursor(attempt, found.offset), last or Cursor(attempt, found.end)
        left -= found.lines
        if left <= 0:
            break
    return begin or Cursor(), last or Cursor()


@dataclass(frozen=True, slots=True)
class _Step:
    """The next lines and the cursor behind them; without lines, `later` is the start of the next attempt, if any."""

    lines: tuple[str, ...]
    at: Cursor
    ended: bool
    exists: bool
    later: Cursor | None = None


def _read(layout: Layout, instance: str, rank: int, at: Cursor) -> _Step:
    key = Key(instance, rank, at.attempt)
    ended = _has_ended(layout, key)
    if at.offset == OFFSET_MAX:  # the log is unusable, and the placeholder was given out
        found, exists = Lines((), OFFSET_MAX), True
    else:
        try:
            found, exists = read_on(layout.log(key), at.offset, ended=ended), door.exists(layout.log(key))
        except UnusableFile as error:
            found, exists = Lines((placeholder(error),), OFFSET_MAX), True
    behind = Cursor(at.attempt, found.offset)
    if found.lines:
        return _Step(found.lines, behind, ended, exists)
    later = next((attempt for attempt in layout.attempts(instance, rank) if attempt > at.attempt), None)
    return _Step((), behind, ended, exists, None if later is None else Cursor(later, 0))


def _has_ended(layout: Layout, key: Key) -> bool:
    """Return whether the attempt has ended; False also for an unreadable record, since more lines may come."""
    try:
        return has_ended(layout, key)
    except (OSError, ValueError):
        return False


async def follow_rank(
    layout: Layout,
    instance: str,
    rank: int,
    cursor: str | None,
    *,
    files: FileWatcher,
    changed: asyncio.Event,
    pool: Pool,
) -> AsyncGenerator[LogChunk, None]:
    """Yield lines from the cursor on as they are written. `changed` is set when ranks of the run start or end."""
    at = Cursor() if cursor is None else Cursor.parse(cursor)
    watched: tuple[int, Callable[[], None]] | None = None  # the attempt whose log is watched, and its unwatch call
    try:
        while True:
            changed.clear()
            step = await pool.run(_read, layout, instance, rank, at)
            at = step.at
            if step.lines:
                yield LogChunk(rank, step.lines, str(at))
                continue
            if (step.ended or not step.exists) and step.later is not None:
                at = step.later
                continue
            if not step.ended and step.exists and (watched is None or watched[0] != at.attempt):
                if watched is not None:
                    watched[1]()
                log = layout.log(Key(instance, rank, at.attempt))
                watched = (at.attempt, files.watch(log, changed.set))
                continue  # read the lines written before the watch began
            yield LogChunk(rank, (), str(at))
            await changed.wait()
    finally:
        if watched is not None:
            watched[1]()
