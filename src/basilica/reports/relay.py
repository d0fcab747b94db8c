"""What the processes of a rank report, passed on to the run's keyspace: the last of it, and how it went.

The last report is told every second if it is new, the series every few seconds, thinned to the rank's share of the
keyspace, and both when an attempt has ended. What earlier attempts told is kept in the series, also that of a container
that is gone: it is read from the keyspace before anything is written.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict

from basilica.core.reports import Report
from basilica.machine.layout import Layout
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import REPORTS, SERIES
from basilica.reports.files import ReportFile, read_points_of, read_reports, report_files
from basilica.reports.points import Point
from basilica.reports.series import RANK_BYTES, Packed, Share, Source, pack, thinned, unpack

LOOK_EVERY_S = 1.0
REST = 20.0  # times as long as it took: of a rank's time, a twentieth at most is spent on its series

Say = Callable[[str, str], None]
Told = dict[Source, list[Point]]


def series_text(packed: Packed) -> str:
    """As it is kept in the keyspace, which holds texts."""
    return base64.urlsafe_b64encode(packed.data).decode()


def told_in(text: str) -> Told:
    """Of a text from the keyspace; nothing of one that is something else."""
    if len(text) > RANK_BYTES:
        return {}
    try:
        return unpack(base64.urlsafe_b64decode(text), room=_room(RANK_BYTES))
    except (binascii.Error, ValueError):
        return {}


def _room(size: int) -> int:
    """For what has so many bytes as a text."""
    return size * 3 // 4


class ReportTelling:
    """`say` writes to the keyspace, sooner or later; `complain` to the rank's log."""

    def __init__(self, rank: int, instance: str, layout: Layout, say: Say, complain: Callable[[str], None]) -> None:
        self._rank, self._instance, self._layout = rank, instance, layout
        self._say, self._complain = say, complain
        self._share, self._attempt = Share.of(1), 0
        self._reported: Report | None = None
        self._earlier: Told | None = None  # of earlier attempts; None: not read yet
        self._seen: object = None  # the report files as they were when the series was last told
        self._due = 0.0
        self._complained = False

    async def learn(self, keys: KeysClient) -> None:
        """Read what was told before this container began, once. `NoAnswer` if that cannot be said."""
        if self._earlier is None:
            found = await keys.get(f"{SERIES}/{self._rank}")
            if not found.ok and found.status != 404:
                raise NoAnswer(f"{found.status} {found.body}")
            told = told_in(str(found.node.get("value", "")))
            self._earlier = {source: points for source, points in told.items() if source[0] == self._rank}

    def begin(self, attempt: int, world: int) -> None:
        self._attempt, self._share, self._due = attempt, Share.of(max(1, world)), 0.0

    async def keep_telling(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._tell_last()
            if time.monotonic() >= self._due:
                began = time.monotonic()
                self._tell_series(await asyncio.to_thread(self._series))
                took = time.monotonic() - began
                self._due = time.monotonic() + max(self._share.every, REST * took)

    def finish(self) -> None:
        """The attempt has ended: tell what is left, and count it among what was told earlier."""
        self._tell_last()
        told = self._all(self._files())
        self._tell_series(self._packed(told))
        self._earlier = {source: thinned(points, self._share.points) for source, points in told.items()}

    def _tell_last(self) -> None:
        found = read_reports(self._layout, self._instance).get(self._rank)
        if found is not None and found != self._reported:
            self._reported = found
            self._say(f"{REPORTS}/{self._rank}", json.dumps(asdict(found)))

    def _tell_series(self, packed: Packed | None) -> None:
        if packed is None:
            return
        self._say(f"{SERIES}/{self._rank}", series_text(packed))
        if packed.left_out and not self._complained:
            self._complained = True
            self._complain(f"{packed.left_out} series of reported numbers have no room and are not shown")

    def _series(self) -> Packed | None:
        """None if there is nothing new."""
        files = self._files()
        seen = [_stamp(file) for file in files]
        if not files or seen == self._seen:
            return None
        self._seen = seen
        return self._packed(self._all(files))

    def _packed(self, told: Told) -> Packed | None:
        if not told:
            return None
        return pack(told, points=self._share.points, room=_room(self._share.bytes))

    def _files(self) -> list[ReportFile]:
        """Of this attempt."""
        files = report_files(self._layout, self._instance)
        mine = [file for file in files if (file.key.rank, file.key.attempt) == (self._rank, self._attempt)]
        return sorted(mine, key=lambda file: file.pid)

    def _all(self, files: list[ReportFile]) -> Told:
        """Those of one worker in the order of time, also where several processes were it."""
        found: Told = {source: list(points) for source, points in (self._earlier or {}).items()}
        for file in files:
            source, points = read_points_of(file)
            found.setdefault(source, []).extend(point for point in points if point.values)
        return {source: sorted(points, key=lambda point: point.at) for source, points in found.items() if points}


def _stamp(file: ReportFile) -> tuple[str, int, int]:
    with contextlib.suppress(OSError):
        found = os.stat(file.path)
        return file.path, found.st_mtime_ns, found.st_size
    return file.path, 0, 0
