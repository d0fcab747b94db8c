"""Following the log of a rank: nothing twice, and nothing missed that was there when the reader is told so."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

import pytest

from basilica.kube.client.api import KubeApi
from basilica.runtimes.kubernetes.logs import LINE_MAX, Follower, Splitter, tail
from basilica.runtimes.kubernetes.parse import PodFacts

RUNNING = PodFacts(name="train-0-x", uid="u1", rank=0, created="1", node="node-0", phase="Running", state="running")
ENDED = replace(RUNNING, phase="Succeeded", state="terminated")
STARTING = replace(RUNNING, phase="Pending", state="waiting", reason="ContainerCreating")


class Node:
    """Has the log of one pod. `stalls`: what is followed never comes, as over a connection that hangs."""

    def __init__(self, text: str, *, stalls: bool = False) -> None:
        self._text, self._stalls = text.encode(), stalls

    async def logs(self, path: str, *, container: str, follow: bool = False) -> AsyncGenerator[bytes, None]:
        if follow and self._stalls:
            await asyncio.Event().wait()
        yield self._text


def read(node: Node, pod: PodFacts, cursor: str | None) -> list[str]:
    """What a follower gives before it says that all was read."""

    async def story() -> list[str]:
        lines: list[str] = []
        follower = Follower(cast(KubeApi, node), "u-ada", 0, lambda: [pod], asyncio.Event())
        async with asyncio.timeout(30):
            async for chunk in follower.follow(cursor):
                if not chunk.lines:
                    return lines
                lines += chunk.lines
        raise AssertionError("it never said that all was read")

    return asyncio.run(story())


@pytest.mark.parametrize("text", ["one\ntwo\n", "one\ntwo"])
def test_what_was_read_already_does_not_come_again(text: str) -> None:
    node = Node(text)
    chunk = asyncio.run(tail(cast(KubeApi, node), "u-ada", 0, [ENDED], 1))
    assert chunk.lines == ("two",)
    assert read(node, ENDED, chunk.cursor) == []
    assert read(node, ENDED, "u1:1") == ["two"]
    assert read(node, ENDED, None) == ["one", "two"]


def test_a_stream_that_says_nothing_is_no_proof_that_there_is_nothing() -> None:
    assert read(Node("one\ntwo\n", stalls=True), RUNNING, "u1:1") == ["two"]


def test_a_pod_may_have_said_something_before_its_status_says_that_it_began() -> None:
    assert read(Node("one\n", stalls=True), STARTING, None) == ["one"]
    assert read(Node(""), STARTING, None) == []


@pytest.mark.parametrize("step", [1 << 30, LINE_MAX + 1, LINE_MAX, LINE_MAX - 1, 100_003])
def test_lines_are_cut_at_the_same_places_however_they_arrive(step: int) -> None:
    sizes = [0, 1, LINE_MAX - 1, LINE_MAX, LINE_MAX + 1, 2 * LINE_MAX, 2 * LINE_MAX + 1, 0]
    data = b"\n".join(b"x" * size for size in sizes) + b"\nrest"
    splitter = Splitter()
    lines = [line for start in range(0, len(data), step) for line in splitter.feed(data[start : start + step])]
    cut = [0, 1, LINE_MAX - 1, LINE_MAX, LINE_MAX, 1, LINE_MAX, LINE_MAX, LINE_MAX, LINE_MAX, 1, 0]
    assert ([len(line) for line in lines], splitter.rest) == (cut, b"rest")
