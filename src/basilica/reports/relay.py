"""The relay of a rank's reports to the run's keyspace: the last report, and the series of all.

The last report is published every second if it is new, the series every few seconds, thinned to the rank's share of the
keyspace, and both when an attempt has ended. The series keeps the points of earlier attempts, also those of a container
that is gone: they are read from the keyspace before the first write.
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

POLL_EVERY_S = 1.0
REST = 20.0  # pause, as a multiple of the time taken: a rank spends a twentieth of its time on the series at most

Publish = Callable[[str, str], None]
Published = dict[Source, list[Point]]


def series_text(packed: Packed) -> str:
    """Encode a series for the keyspace, whose values are texts."""
    return base64.urlsafe_b64encode(packed.data).decode()


def parse_published(text: str) -> Published:
    """Decode a series from the keyspace; anything else is an empty one."""
    if len(text) > RANK_BYTES:
        return {}
    try:
        return unpack(base64.urlsafe_b64decode(text), room=_room(RANK_BYTES))
    except (binascii.Error, ValueError):
        return {}


def _room(size: int) -> int:
    """Return the bytes that fit into a text of this size."""
    return size * 3 // 4


class ReportRelay:
    """The relay of one rank. `publish` writes to the keyspace, sooner or later; `log` to the rank's log."""

    def __init__(self, rank: int, instance: str, layout: Layout, publish: Publish, log: Callable[[str], None]) -> None:
        self._rank, self._instance, self._layout = rank, instance, layout
        self._publish, self._log = publish, log
        self._share, self._attempt = Share.of(1), 0
        self._reported: Report | None = None
        self._earlier: Published | None = None  # of earlier attempts; None: not read yet
        self._seen: object = None  # the report files as they were when the series was last published
        self._due = 0.0
        self._warned = False

    async def load_earlier(self, keys: KeysClient) -> None:
        """Load the series from before this container, once. Raise `NoAnswer` if the keyspace does not give it."""
        if self._earlier is None:
            found = await keys.get(f"{SERIES}/{self._rank}")
            if not found.ok and found.status != 404:
                raise NoAnswer(f"{found.status} {found.body}")
            published = parse_published(str(found.node.get("value", "")))
            self._earlier = {source: points for source, points in published.items() if source[0] == self._rank}

    def begin(self, attempt: int, world: int) -> None:
        self._attempt, self._share, self._due = attempt, Share.of(max(1, world)), 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            self._publish_last()
            if time.monotonic() >= self._due:
                began = time.monotonic()
                self._publish_series(await asyncio.to_thread(self._series))
                took = time.monotonic() - began
                self._due = time.monotonic() + max(self._share.every, REST * took)

    def finish(self) -> None:
        """Publish the last of an attempt that has ended, and keep its points as earlier ones."""
        self._publish_last()
        published = self._all(self._files())
        self._publish_series(self._packed(published))
        self._earlier = {source: thinned(points, self._share.points) for source, points in published.items()}

    def _publish_last(self) -> None:
        found = read_reports(self._layout, self._instance).get(self._rank)
        if found is not None and found != self._reported:
            self._reported = found
            self._publish(f"{REPORTS}/{self._rank}", json.dumps(asdict(found)))

    def _publish_series(self, packed: Packed | None) -> None:
        if packed is None:
            return
        self._publish(f"{SERIES}/{self._rank}", series_text(packed))
        if packed.left_out and not self._warned:
            self._warned = True
            self._log(f"{packed.left_out} series of reported numbers have no room and are not shown")

    def _series(self) -> Packed | None:
        """Return the series of all attempts; None if no report file has changed."""
        files = self._files()
        seen = [_stamp(file) for file in files]
        if not files or seen == self._seen:
            return None
        self._seen = seen
        return self._packed(self._all(files))

    def _packed(self, published: Published) -> Packed | None:
        if not published:
            return None
        return pack(published, points=self._share.points, room=_room(self._share.bytes))

    def _files(self) -> list[ReportFile]:
        """Return the report files of this attempt."""
        files = report_files(self._layout, self._instance)
        mine = [file for file in files if (file.key.rank, file.key.attempt) == (self._rank, self._attempt)]
        return sorted(mine, key=lambda file: file.pid)

    def _all(self, files: list[ReportFile]) -> Published:
        """Return the points of each worker in the order of time, also where several processes were one worker."""
        found: Published = {source: list(points) for source, points in (self._earlier or {}).items()}
        for file in files:
            source, points = read_points_of(file)
            found.setdefault(source, []).extend(point for point in points if point.values)
        return {source: sorted(points, key=lambda point: point.at) for source, points in found.items() if points}


def _stamp(file: ReportFile) -> tuple[str, int, int]:
    with contextlib.suppress(OSError):
        found = os.stat(file.path)
        return file.path, found.st_mtime_ns, found.st_size
    return file.path, 0, 0
