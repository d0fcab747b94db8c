"""The control plane's client of one run's keyspace: orders out, records in, both mirrored here."""

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from basilica.core.ends import CANCELLED
from basilica.core.errors import RuntimeUnavailable
from basilica.core.fencing import FenceTimes
from basilica.core.mesh import Announcement, Pair, SeenRendezvous, failing_pairs
from basilica.core.seen import Ended
from basilica.rendezvous.announcements import announce, announced, must, parse_notice
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.driver import Driver
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.mirror import KeysMirror
from basilica.rendezvous.names import ACTIVITY, ATTEMPTS, HEARD, NOTICE, ORDERS, PAIRS, REPORTS, RESULTS, ROOT
from basilica.rendezvous.orders import (
    AttemptRecord,
    Order,
    attempt_key,
    load_order,
    load_record,
    order_key,
    orders_in,
    records_in,
)
from basilica.rendezvous.pairs import parse_report
from basilica.rendezvous.presence import load_heard
from basilica.runtimes.kubernetes.activities import Activities
from basilica.runtimes.kubernetes.node_evidence import Heartbeats
from basilica.runtimes.kubernetes.wakes import Tally

NOT_STARTED = CANCELLED
SHOWN_AFTER_S = 3.0  # a rendezvous that merely restarts is back before that
DEFAULT_TIMES = FenceTimes()


class RunKeys:
    """The mirror and the writer. Orders that the keyspace has not confirmed are kept and written again.

    `changed` is called after each change that the controller may decide on, `reported` after others: reports, and
    steps that nobody waits for.
    """

    def __init__(
        self,
        endpoint: str,
        instance: str,
        changed: Callable[[], None],
        reported: Callable[[], None] = lambda: None,
        times: FenceTimes = DEFAULT_TIMES,
    ) -> None:
        self.endpoint, self._instance, self._changed, self._reported = endpoint, instance, changed, reported
        self._keys = KeysClient(endpoint)
        self._writing = asyncio.Lock()
        self._mirror = KeysMirror(endpoint, ROOT, self._apply_change)
        self._orders: dict[int, Order] = {}
        self._pending: dict[int, Order] = {}  # not yet written, or written and not yet seen
        self.records: dict[tuple[int, int], AttemptRecord] = {}
        self.activities = Activities()
        self.heartbeats = Heartbeats(times)
        self._silent_since = time.monotonic()
        self._driver: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._mirror.run(), name=f"keys-{instance}")]

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._driver] if self._driver is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keys.close()

    # ---- reads -----------------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """Whether the keyspace has answered at least once."""
        return self._mirror.known

    @property
    def silent_for(self) -> float:
        """Seconds without an answer; 0 while the mirror follows."""
        return 0.0 if self._mirror.fresh else time.monotonic() - self._silent_since

    @property
    def orders(self) -> Mapping[int, Order]:
        return {**self._orders, **self._pending}

    def tally(self, marks: Sequence[int]) -> Tally:
        """Count the states of the ordered attempts."""
        found = [self.records.get((rank, order.attempt)) for rank, order in self.orders.items()]
        ends = [record.ended for record in found if record is not None and record.ended is not None]
        live = [
            (rank, order.attempt)
            for (rank, order), record in zip(self.orders.items(), found, strict=True)
            if record is not None and record.started_at is not None and record.ended is None
        ]
        notice = parse_notice(self._mirror.values.get(NOTICE, ""))
        return Tally(
            answers=self._mirror.fresh,
            up=len(live),
            ended=len(ends),
            failed=sum(end.exit_code != 0 and not end.stopped for end in ends),
            marks=marks,
            activity=self.activities.tally(live, 0 if notice is None else notice.number),
        )

    def seen(self, now: float) -> SeenRendezvous:
        """Return the rendezvous for a sighting. `now`: by the wall clock. A short silence is not shown, as it may be
        over in a moment, nor is one before the first answer.
        """
        silence = self.silent_for
        return SeenRendezvous(
            endpoint=self.endpoint,
            says=announced(self._mirror.values) if self.known else None,
            silent_since=now - silence if self.known and silence >= SHOWN_AFTER_S else None,
        )

    def shown_in(self) -> float | None:
        """Return the seconds until a silence is to be shown, if it lasts; None if there is none, or it is shown
        already.
        """
        silence = self.silent_for
        return SHOWN_AFTER_S - silence if self.known and 0.0 < silence < SHOWN_AFTER_S else None

    def failing(self, hosts: tuple[str, ...]) -> tuple[Pair, ...]:
        """Return the broken ways between hosts, which are named as the ranks' reach agents name themselves."""
        reports: dict[str, Mapping[str, str]] = {}
        for key, value in self._mirror.values.items():
            report = parse_report(value) if key.startswith(f"{PAIRS}/") else None
            if report is not None:
                reports[key.removeprefix(f"{PAIRS}/")] = report
        return failing_pairs(hosts, reports)

    async def results(self) -> dict[int, bytes]:
        """Read the results from the keyspace, not the mirror: the mirror may lag behind a container's end and the
        result before it.
        """
        try:
            found = await self._keys.get(RESULTS, recursive=True)
        except NoAnswer as error:
            raise RuntimeUnavailable(f"the rendezvous of {self._instance} does not answer: {error}") from error
        texts = _by_rank(found.leaves(), RESULTS)
        return {rank: value for rank, text in texts if (value := _decoded(text)) is not None}

    def reports(self) -> dict[int, str]:
        return dict(_by_rank(self._mirror.values, REPORTS))

    def _apply_change(self, key: str | None) -> None:
        values = self._mirror.values
        is_decisive = True
        if key is None:
            self._reload_heartbeats()
            self.activities.reload(values)
            self._orders = orders_in(values)
            self.records |= records_in(values)  # a record stays true even if the keyspace lost it
            self._silent_since = time.monotonic()
            if self._mirror.fresh and self._pending:
                self._tasks.append(asyncio.create_task(self._write_pending()))
        elif key.startswith(f"{ORDERS}/"):
            order, rank = load_order(values.get(key, "")), key.removeprefix(f"{ORDERS}/")
            if order is not None and rank.isdecimal():
                self._orders[int(rank)] = order
        elif key.startswith(f"{ATTEMPTS}/"):
            rank, _, attempt = key.removeprefix(f"{ATTEMPTS}/").partition("/")
            record = load_record(values.get(key, ""))
            if record is not None and rank.isdecimal() and attempt.isdecimal():
                self.records[int(rank), int(attempt)] = record
        elif key.startswith(f"{HEARD}/"):
            self.heartbeats.update(key.removeprefix(f"{HEARD}/"), load_heard(values.get(key, "")), time.monotonic())
        elif key == HEARD:
            self._reload_heartbeats()
        elif key.startswith(f"{ACTIVITY}/"):
            is_decisive = self.activities.take(key, values.get(key, ""))
        elif key.startswith(f"{REPORTS}/"):
            is_decisive = False
        self._pending = {n: order for n, order in self._pending.items() if self._orders.get(n) != order}
        (self._changed if is_decisive else self._reported)()

    def _reload_heartbeats(self) -> None:
        now = time.monotonic()
        if not self._mirror.fresh:
            self.heartbeats.pause(now)
            return
        keys = (key for key in self._mirror.values if key.startswith(f"{HEARD}/"))
        found = {key.removeprefix(f"{HEARD}/"): load_heard(self._mirror.values[key]) for key in keys}
        self.heartbeats.reload({agent: heard for agent, heard in found.items() if heard is not None}, now)

    # ---- writes ----------------------------------------------------------------------------------------------------

    async def announce(self, announcement: Announcement, *, drives_torch: bool) -> None:
        says = announced(self._mirror.values) if self._mirror.fresh else None
        await self._do(announce(self._keys, says, announcement))
        if drives_torch and self._driver is None:
            self._driver = asyncio.create_task(Driver(self.endpoint, self._instance).run(), name="driver")

    async def _do(self, work: Awaitable[object]) -> None:
        try:
            async with self._writing:
                await work
        except NoAnswer as error:
            raise RuntimeUnavailable(f"the rendezvous of {self._instance} does not answer: {error}") from error

    def launch(self, orders: Mapping[int, Order]) -> None:
        """Order these attempts to run, at once or as soon as the keyspace answers. An order for a later attempt is
        kept.
        """
        for rank, order in orders.items():
            known = self.orders.get(rank)
            if known is None or known.attempt < order.attempt:
                self._pending[rank] = order
        if self._mirror.fresh and self._pending:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._write_pending()))

    async def _write_pending(self) -> None:
        try:
            async with self._writing:
                for rank, order in list(self._pending.items()):
                    await must(self._keys.put(order_key(rank), order.dump()))
        except NoAnswer:
            return  # the orders stay pending until the keyspace answers

    async def stop(self, orders: Mapping[int, Order]) -> None:
        """Order these attempts to end. An attempt that nobody has claimed gets a tombstone, so that nobody ever
        will.
        """
        changed: dict[int, Order] = {}
        for rank, order in orders.items():
            known = self.orders.get(rank)
            if known is not None and known.attempt > order.attempt:
                continue
            self._pending.pop(rank, None)
            grace = order.grace if known is None or known.run else min(order.grace, known.grace)
            wanted = Order(attempt=order.attempt, run=False, grace=grace, leave=order.leave)
            if wanted != self._orders.get(rank):
                changed[rank] = self._pending[rank] = wanted  # a concurrent look must not take it for running
        for rank, order in changed.items():
            await self._do(must(self._keys.put(order_key(rank), order.dump())))
        unclaimed = [
            (rank, order.attempt) for rank, order in orders.items() if (rank, order.attempt) not in self.records
        ]
        for rank, attempt in unclaimed:
            await self._do(self._bury(rank, attempt))

    async def _bury(self, rank: int, attempt: int) -> None:
        never = Ended(exit_code=None, reason=NOT_STARTED, finished_at=time.time(), stopped=True)
        record = AttemptRecord(pod="", ended=never)
        answer = await self._keys.put(attempt_key(rank, attempt), record.dump(), prev_exist=False)
        if not (answer.ok or answer.status == 412):
            raise NoAnswer(f"{answer.status} {answer.body.get('message', '')}")

    async def conclude(self, ends: Mapping[tuple[int, int], Ended]) -> None:
        """Record the ends of attempts whose agents could not record them."""
        for (rank, attempt), ended in ends.items():
            record = replace(self.records[rank, attempt], ended=ended)
            await self._do(must(self._keys.put(attempt_key(rank, attempt), record.dump())))

    async def dismiss(self, ranks: Iterable[int]) -> None:
        """Order the containers of these ranks to end."""
        for rank in ranks:
            known = self.orders.get(rank)
            order = Order(attempt=known.attempt if known is not None else 0, run=False, leave=True)
            self._pending.pop(rank, None)
            await self._do(must(self._keys.put(order_key(rank), order.dump())))


def _by_rank(values: Mapping[str, str], root: str) -> Iterable[tuple[int, str]]:
    for key, value in values.items():
        rank = key.removeprefix(f"{root}/")
        if key.startswith(f"{root}/") and rank.isdecimal():
            yield int(rank), value


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
