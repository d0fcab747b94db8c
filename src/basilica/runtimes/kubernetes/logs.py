"""The log of a rank: the logs of its pods, one after the other, which hold the output of all attempts that ran in them.

A cursor is a pod and a number of lines. Lines are read from the node that runs the pod, while the pod exists.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from basilica.core.errors import RuntimeUnavailable, ValidationError
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.manifests.run import WORKER_CONTAINER
from basilica.ports import LogChunk
from basilica.runtimes.kubernetes.parse import PodFacts

QUIET_S = 0.3  # after so long without a line, the backlog has arrived
AGAIN_S = 1.0
LINE_MAX = 1 << 20
BEGINNING = ":0"
_NOT_THERE = (400, 404)  # not started yet, or gone

Pods = Callable[[], Sequence[PodFacts]]  # of the rank, oldest first


class Splitter:
    """Splits a stream of bytes into lines. A line longer than `LINE_MAX` comes in pieces, each of which counts as a
    line: the cuts depend on the line alone, so that numbers of lines mean the same to every reader.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        lines = [part for line in lines for part in _parts(line)]
        while len(self.rest) > LINE_MAX:
            lines.append(self.rest[:LINE_MAX])
            self.rest = self.rest[LINE_MAX:]
        return lines


def _parts(line: bytes) -> list[bytes]:
    return [line[start : start + LINE_MAX] for start in range(0, len(line), LINE_MAX)] or [b""]


async def tail(api: KubeApi, namespace: str, rank: int, pods: Sequence[PodFacts], lines: int | None) -> LogChunk:
    """Return the last lines over all pods, with the cursor after them."""
    found: list[str] = []
    cursor = ""
    for pod in reversed(pods):
        wanted = None if lines is None else max(0, lines - len(found))
        if wanted == 0 and cursor:
            break
        kept: deque[str] = deque(maxlen=wanted)
        count = 0
        async with aclosing(_read_now(api, namespace, pod)) as read:
            async for some in read:
                kept += some
                count += len(some)
        cursor = cursor or f"{pod.uid}:{count}"
        found = [*kept, *found]
    return LogChunk(rank, tuple(found), cursor or BEGINNING)


async def tail_cursor(api: KubeApi, namespace: str, pods: Sequence[PodFacts], lines: int) -> str:
    """Return the cursor before the last lines over all pods: they are counted, not kept."""
    cursor = BEGINNING
    for pod in reversed(pods):
        count = 0
        async with aclosing(_read_now(api, namespace, pod)) as read:
            async for some in read:
                count += len(some)
        cursor = f"{pod.uid}:{max(0, count - lines)}"
        lines -= count
        if lines <= 0:
            break
    return cursor


async def _read_now(api: KubeApi, namespace: str, pod: PodFacts, skip: int = 0) -> AsyncGenerator[list[str], None]:
    """Yield the lines that a pod has written so far after the first `skip`, some at a time; of an ended pod also a last
    line without a newline.
    """
    splitter = Splitter()
    try:
        async with aclosing(api.logs(_path(namespace, pod), container=WORKER_CONTAINER)) as stream:
            async for piece in stream:
                found = splitter.feed(piece)
                lines, skip = found[skip:], max(0, skip - len(found))
                if lines:
                    yield _decoded(lines)
    except ApiError as error:
        if error.status in _NOT_THERE:
            return
        raise RuntimeUnavailable(f"cannot read the log of {pod.name}: {error}") from error
    if pod.over and splitter.rest and not skip:
        yield _decoded([splitter.rest])


def _decoded(lines: Sequence[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in lines]


class Follower:
    """Follows one rank from pod to pod. `changed` is set when its pods change."""

    def __init__(self, api: KubeApi, namespace: str, rank: int, pods: Pods, changed: asyncio.Event) -> None:
        self._api, self._namespace, self._rank = api, namespace, rank
        self._pods, self._changed = pods, changed
        self._read: set[str] = set()  # uids of pods that were read to their end
        self._uid, self._lines = "", 0

    async def follow(self, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        self._begin_at(cursor)
        while True:
            pod = self._next_pod() or await self._early_pod()
            if pod is None:
                yield self._chunk(())
                await self._changed.wait()
                self._changed.clear()
                continue
            if pod.uid != self._uid:
                self._uid, self._lines = pod.uid, 0
            async with aclosing(self._follow_pod(pod)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def read(self, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        """Yield the lines that exist now."""
        self._begin_at(cursor)
        for pod in self._pods():
            if pod.uid in self._read:
                continue
            if pod.uid != self._uid:
                self._uid, self._lines = pod.uid, 0
            async with aclosing(_read_now(self._api, self._namespace, pod, self._lines)) as read:
                async for lines in read:
                    self._lines += len(lines)
                    yield self._chunk(tuple(lines))

    def _begin_at(self, cursor: str | None) -> None:
        uid, _, count = (cursor or BEGINNING).partition(":")
        if not (count.isascii() and count.isdecimal() and len(count) < 16):
            raise ValidationError("since", (cursor or "")[:80], "is no cursor of this log")
        pods = self._pods()
        if any(pod.uid == uid for pod in pods):
            self._uid, self._lines = uid, int(count)
            for pod in pods:
                if pod.uid == uid:
                    break
                self._read.add(pod.uid)

    def _next_pod(self) -> PodFacts | None:
        """Return the oldest pod that has a log and was not read yet."""
        return next((pod for pod in self._pods() if pod.uid not in self._read and _has_log(pod)), None)

    async def _early_pod(self) -> PodFacts | None:
        """Return a pod that has lines before its status shows that it began: a short rank has ended by then."""
        for pod in self._pods():
            if pod.uid not in self._read and pod.node and await self._has_lines(pod):
                return pod
        return None

    async def _has_lines(self, pod: PodFacts) -> bool:
        with suppress(RuntimeUnavailable):
            async with aclosing(_read_now(self._api, self._namespace, pod)) as read:
                return await anext(read, None) is not None
        return False

    async def _read_after(self, pod: PodFacts, skip: int) -> AsyncGenerator[list[str], None]:
        """Yield the lines that the pod has written so far after `skip` lines; none if they cannot be read now."""
        with suppress(RuntimeUnavailable):
            async with aclosing(_read_now(self._api, self._namespace, pod, skip)) as read:
                async for lines in read:
                    yield lines

    def _chunk(self, lines: tuple[str, ...]) -> LogChunk:
        return LogChunk(self._rank, lines, f"{self._uid}:{self._lines}")

    async def _follow_pod(self, pod: PodFacts) -> AsyncGenerator[LogChunk, None]:
        """Yield lines until the container has ended and all is read, or the connection broke: `follow` then begins
        again.
        """
        pieces: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue(maxsize=1)
        reader = asyncio.create_task(self._stream(pod, pieces))
        skip, splitter, quiet, caught_up = self._lines, Splitter(), False, False
        try:
            while True:
                piece: bytes | ApiError | None
                try:
                    async with asyncio.timeout(None if quiet else QUIET_S):
                        piece = await pieces.get()
                except TimeoutError:
                    quiet = True
                    if not caught_up:  # the connection may just be slow, and existing lines must not be missed
                        caught_up = True
                        async with aclosing(self._read_after(pod, self._lines)) as read:
                            async for missing in read:
                                skip += len(missing)
                                self._lines += len(missing)
                                yield self._chunk(tuple(missing))
                    if not self._is_over(pod):
                        yield self._chunk(())
                    continue
                if not isinstance(piece, bytes):
                    break
                lines = splitter.feed(piece)
                lines, skip = lines[skip:], max(0, skip - len(lines))
                if lines:
                    quiet = False
                    self._lines += len(lines)
                    yield self._chunk(tuple(_decoded(lines)))
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        over = self._is_over(pod)
        if over and splitter.rest and not skip and not isinstance(piece, ApiError):
            self._lines += 1
            yield self._chunk(tuple(_decoded([splitter.rest])))
        if (over and piece is None) or (isinstance(piece, ApiError) and piece.status == 404):
            self._read.add(pod.uid)
        else:
            await asyncio.sleep(QUIET_S if piece is None else AGAIN_S)

    def _is_over(self, pod: PodFacts) -> bool:
        now = next((each for each in self._pods() if each.uid == pod.uid), None)
        return now is None or now.over

    async def _stream(self, pod: PodFacts, pieces: "asyncio.Queue[bytes | ApiError | None]") -> None:
        try:
            stream = self._api.logs(_path(self._namespace, pod), container=WORKER_CONTAINER, follow=True)
            async with aclosing(stream):
                async for piece in stream:
                    await pieces.put(piece)
            await pieces.put(None)
        except ApiError as error:
            await pieces.put(error)


def _has_log(pod: PodFacts) -> bool:
    return pod.state in ("running", "terminated")


def _path(namespace: str, pod: PodFacts) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{pod.name}"
