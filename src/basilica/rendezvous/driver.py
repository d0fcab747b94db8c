"""The driver of torchelastic in one run's keyspace: reads the state, writes what `elastic` decides, and waits for the
next change.

It keeps one connection, on which a run at rest has one long poll open: refreshed keep-alives wake nobody. It has no
state that matters: a new driver reads the keys and goes on. Several drivers of one run do no harm, since every write is
a compare-and-swap.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.elastic import (
    LookAgain,
    Open,
    Round,
    Status,
    Step,
    Swap,
    UnknownShape,
    decide,
    first_value,
    parse_round,
    parse_target,
    without_the_gone,
)
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.introductions import introduced, missing_entries
from basilica.rendezvous.names import WORLD

log = logging.getLogger(__name__)

AGAIN_FIRST_S, AGAIN_MAX_S = 0.05, 2.0
INTRODUCE_AGAIN_S = 0.2  # agents answer within milliseconds
KEY_NOT_FOUND, COMPARE_FAILED, KEY_EXISTS, WATCHER_CLEARED, EVENT_INDEX_CLEARED = 100, 101, 105, 400, 401


class Driver:
    """The driver of the run `run_id`, whose keyspace is at `endpoint` (host:port).

    The number of agents wanted is read from the keyspace, at `WORLD`; without it the driver does nothing.
    """

    def __init__(self, endpoint: str, run_id: str) -> None:
        self._run_id = run_id
        self._rounds = f"/torchelastic/p2p/run_{run_id}/rdzv"
        self._active = f"{self._rounds}/active_version"
        self._client = KeysClient(endpoint)
        self._keep_alives: str | None = None  # those of the round that trains, if one does
        self._pending: tuple[str, int] | None = None  # the pending step of the last read
        self._pending_since = 0.0
        self._warned = False

    async def run(self) -> None:
        """Drive until cancelled. A rendezvous that does not answer is polled with growing pauses."""
        loop, pause = asyncio.get_running_loop(), AGAIN_FIRST_S
        try:
            while True:
                began = loop.time()
                try:
                    await self._change_after(await self._settle())
                    continue
                except NoAnswer as problem:
                    log.debug("run %s: %s", self._run_id, problem)
                except Exception:  # nothing awaits this task: a defect must not end it unnoticed
                    log.exception("run %s: the rendezvous is not driven", self._run_id)
                pause = AGAIN_FIRST_S if loop.time() - began > AGAIN_MAX_S else min(pause * 2, AGAIN_MAX_S)
                await asyncio.sleep(pause)
        finally:
            await self._client.close()

    async def _settle(self) -> int:
        """Write until there is nothing left to write; return the index of that state."""
        while True:
            world = _checked(await self._client.get(WORLD), KEY_NOT_FOUND)
            active = _checked(await self._client.get(self._active), KEY_NOT_FOUND)
            try:
                target = parse_target(_value(world)) if world.ok else 0
                found = parse_round(_value(active)) if active.ok else None
            except UnknownShape as problem:
                self._warn_once(problem)
                return world.index
            tended = await self._tend(found)
            match self._step(found, target) or tended:
                case None:
                    return world.index
                case LookAgain(seconds):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await self._change_after(world.index)
                case Swap(value, ttl):
                    await self._swap(self._active, active, value, ttl)
                case Open():
                    await self._open(active, target)

    def _step(self, found: Round | None, target: int) -> Step:
        if found is None:
            return None
        now = asyncio.get_running_loop().time()
        if self._pending != found.pending:
            self._pending, self._pending_since = found.pending, now
        return decide(found, target, now - self._pending_since)

    async def _tend(self, found: Round | None) -> Step:
        """Complete, in a final round, the steps that departed members left undone."""
        self._keep_alives = None
        if found is None or found.status is not Status.FINAL:
            return None
        version = f"{self._rounds}/v_{found.fields['version']}"
        self._keep_alives = f"{version}/rank_"
        alive = _checked(await self._client.get(version), KEY_NOT_FOUND).children()
        if found.ends and not await self._introduce(f"{version}/kv", found.participants):
            return LookAgain(INTRODUCE_AGAIN_S)
        return without_the_gone(found, alive)

    async def _introduce(self, store: str, members: int) -> bool:
        """Write the introductions that agents of a round still wait for; return whether none was missing."""
        published = _checked(await self._client.get(store), KEY_NOT_FOUND).leaves()
        if introduced(store, published, members):
            return True
        try:
            entries = missing_entries(store, published, members)
        except UnknownShape as problem:
            self._warn_once(problem)
            return True
        for key, value in entries.items():
            _checked(await self._client.put(key, value, prev_exist=False), KEY_EXISTS)
        return False

    async def _open(self, active: Answer, target: int) -> None:
        """Open a new round. A version that is taken and then not used is a gap in the numbers, which torch does not
        mind.
        """
        counter_key = f"{self._rounds}/version_counter"
        counter = _checked(await self._client.get(counter_key), KEY_NOT_FOUND)
        if not (counter.ok and _value(counter).isascii() and _value(counter).isdigit()):
            raise NoAnswer(f"{counter_key} is {_value(counter)!r}")
        version = int(_value(counter)) + 1
        if await self._swap(counter_key, counter, str(version)):
            await self._swap(self._active, active, first_value(version, target))

    async def _swap(self, key: str, found: Answer, value: str, ttl: int | None = None) -> bool:
        """Compare and swap; False if another writer was first: then there is a new state to read."""
        index = _index(found.node)
        answer = await self._client.put(key, value, ttl=ttl, prev_index=index)
        return _checked(answer, COMPARE_FAILED, KEY_NOT_FOUND).ok

    async def _change_after(self, index: int) -> None:
        """Return once a relevant key has changed, or if the history does not reach back far enough."""
        while True:
            event = await self._client.wait("/", index + 1, recursive=True)
            if not _checked(event, WATCHER_CLEARED, EVENT_INDEX_CLEARED).ok:
                return
            if _index(event.node) <= index:
                raise NoAnswer("a change from before the one that was asked for")
            key, index = event.node.get("key"), _index(event.node)
            if isinstance(key, str) and self._counts(key):
                return

    def _counts(self, key: str) -> bool:
        if self._keep_alives is not None and key.startswith(self._keep_alives):
            return True
        # The event of a removed directory has the directory's name only.
        return any(f"{ours}/".startswith(f"{key}/") for ours in (WORLD, self._active))

    def _warn_once(self, problem: UnknownShape) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "run %s: torch's rendezvous is left alone, since its state or the target %s", self._run_id, problem
            )


def _checked(answer: Answer, *expected: int) -> Answer:
    """Return the answer, or raise `NoAnswer` for an unexpected refusal, where an immediate retry is of no use."""
    if not answer.ok and answer.body.get("errorCode") not in expected:
        raise NoAnswer(f"etcd answers {answer.status}: {answer.body}")
    if answer.index == 0 or (answer.ok and not answer.node):
        raise NoAnswer("what answers is no etcd")
    return answer


def _value(answer: Answer) -> str:
    value = answer.node.get("value")
    return value if isinstance(value, str) else ""


def _index(node: Mapping[str, Any]) -> int:
    index = node.get("modifiedIndex")
    if not isinstance(index, int) or index < 1:
        raise NoAnswer(f"a key without an index: {node}")
    return index
