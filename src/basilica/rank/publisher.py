"""The publisher of a rank's agent: attempt records, results and reports on their way to the run's keyspace.

A keyspace that does not answer for a while changes nothing: values wait here, in the order in which they were
published, and lasting values are published again to a keyspace that may have lost them.
"""

import asyncio
import base64
import contextlib
from dataclasses import replace
from pathlib import Path

from basilica.core.seen import Ended
from basilica.machine import files
from basilica.rank.log import log
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import RESULTS
from basilica.rendezvous.orders import AttemptRecord, attempt_key
from basilica.rendezvous.retries import opened, tries

RESULT_BYTES_MAX = 512 << 10
RECORDS_KEPT = 4
FLUSH_WITHIN_S = 10.0


class Publisher:
    """The keys of one rank in the run's keyspace."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._endpoint, self._rank = endpoint, rank
        self._records: dict[int, AttemptRecord] = {}
        self._pending: dict[str, str] = {}  # keys and values that the keyspace has yet to take
        self._lasting: dict[str, str] = {}  # keys and values that it must have for as long as this container runs
        self._enqueued, self._drained = asyncio.Event(), asyncio.Event()

    def publish(self, key: str, value: str) -> None:
        self._pending.pop(key, None)
        self._pending[key] = value  # last in the queue, also if the key was in it
        self._drained.clear()
        self._enqueued.set()

    def publish_lasting(self, key: str, value: str) -> None:
        """Publish the value, also to a keyspace that has lost it since."""
        self._lasting[key] = value
        self.publish(key, value)

    def publish_lasting_again(self) -> None:
        for key, value in self._lasting.items():
            self.publish(key, value)

    def publish_all_again(self) -> None:
        """Publish the lasting values and the records again: the keyspace may have been lost."""
        self.publish_lasting_again()
        for attempt, record in self._records.items():
            self.publish(attempt_key(self._rank, attempt), record.dump())

    def publish_result(self, path: Path) -> None:
        """Publish the rank's result file, if it wrote one."""
        try:
            result = files.read(str(path), RESULT_BYTES_MAX)
        except FileNotFoundError:
            return
        except OSError as error:
            log(f"the result is not kept: {error}")
            return
        self.publish_lasting(f"{RESULTS}/{self._rank}", base64.b64encode(result).decode())

    def add_claimed(self, attempt: int, record: AttemptRecord) -> None:
        """Keep the record of an attempt that was claimed: the claim itself has published it."""
        self._records[attempt] = record

    def record(self, attempt: int, *, started_at: float | None = None, ended: Ended | None = None) -> AttemptRecord:
        """Publish the record of a claimed attempt with its start or its end, and return it."""
        before = self._records[attempt]
        record = self._records[attempt] = replace(before, started_at=started_at or before.started_at, ended=ended)
        while len(self._records) > RECORDS_KEPT:
            del self._records[min(self._records)]
        self.publish(attempt_key(self._rank, attempt), record.dump())
        return record

    async def run(self) -> None:
        """Write pending values to the keyspace, and retry until it takes them."""
        async with opened(self._endpoint) as keys:
            async for again in tries():
                try:
                    while self._pending:
                        key, value = next(iter(self._pending.items()))
                        await keys.put(key, value)
                        if self._pending.get(key) == value:
                            del self._pending[key]
                    self._drained.set()
                    await self._enqueued.wait()
                    self._enqueued.clear()
                    again.at_once = True
                except NoAnswer:
                    continue

    async def flush(self) -> None:
        """Wait until nothing is pending, or so long that the keyspace is probably gone."""
        if self._pending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_WITHIN_S):
                    await self._drained.wait()
