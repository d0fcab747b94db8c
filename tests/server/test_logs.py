"""What ranks wrote: text and JSON, one rank or all, the end of it, and as it comes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.world import World, error_of, story

NDJSON = {"Accept": "application/x-ndjson"}


@story
async def test_the_lines_of_several_ranks_say_whose_they_are(world: World) -> None:
    instance = await world.deploy(target=2)
    await world.runtime.write(instance, 1, "one", "two")
    await world.runtime.write(instance, 0, "zero")
    answer = await world.ann.get(f"/deployments/{instance}/logs")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "0| zero\n1| one\n1| two\n"


@story
async def test_the_lines_of_one_rank_come_as_they_are(world: World) -> None:
    instance = await world.deploy(target=2)
    await world.runtime.write(
        instance, 1, "one", "", "ü \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    )
    answer = await world.ann.get(f"/deployments/{instance}/logs", params={"rank": 1})
    assert answer.text == "one\n\nü 😀\n"


@story
async def test_several_ranks_can_be_chosen(world: World) -> None:
    instance = await world.deploy(target=3)
    for rank in range(3):
        await world.runtime.write(instance, rank, "x")
    answer = await world.ann.get(f"/deployments/{instance}/logs", params={"rank": [0, 2]})
    assert answer.text == "0| x\n2| x\n"


@pytest.mark.parametrize(("tail", "expected"), [(0, ""), (1, "c\n"), (2, "b\nc\n"), (2**32 - 1, "a\nb\nc\n")])
@story
async def test_the_tail_is_the_last_lines(world: World, tail: int, expected: str) -> None:
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, "a", "b", "c")
    answer = await world.ann.get(f"/deployments/{instance}/logs", params={"rank": 0, "tail": tail})
    assert answer.text == expected


@story
async def test_as_json_each_line_has_its_rank_and_a_cursor_to_go_on_from(world: World) -> None:
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, "a", 'b"\\')
    path = f"/deployments/{instance}/logs"
    answer = await world.ann.get(path, headers=NDJSON)
    assert answer.headers["content-type"] == "application/x-ndjson"
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert [(row["rank"], row["line"]) for row in rows] == [(0, "a"), (0, 'b"\\')]
    cursor = rows[-1]["cursor"]
    assert (await world.ann.get(path, params={"since": cursor})).text == ""
    await world.runtime.write(instance, 0, "c")
    assert (await world.ann.get(path, params={"since": cursor, "rank": 0})).text == "c\n"


@story
async def test_what_a_program_writes_to_a_terminal_or_in_no_encoding_is_still_one_answer(world: World) -> None:
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, "\x00\x01\x1b[31m", "\udcff\ud800", "\ufffd", "a\u2028b\x85c")
    text = await world.ann.get(f"/deployments/{instance}/logs", params={"rank": 0})
    assert text.content.decode() == "\x00\x01\x1b[31m\n??\n\ufffd\na\u2028b\x85c\n"
    rows = (await world.ann.get(f"/deployments/{instance}/logs", headers=NDJSON)).content.decode().split("\n")
    assert [json.loads(row)["line"] for row in rows if row][3] == "a\u2028b\x85c"


@story
async def test_following_goes_on_until_the_run_has_ended_and_all_is_read(world: World) -> None:
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, "before")
    async with (
        world.listening() as client,
        client.stream("GET", f"/deployments/{instance}/logs?follow=true&rank=0") as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == "before"
        await world.runtime.write(instance, 0, "during")
        assert await anext(lines) == "during"
        await world.runtime.write(instance, 0, "last words")
        world.runtime.exit(instance, 0, 0)
        assert [line async for line in lines] == ["last words"]


@story
async def test_following_takes_up_the_ranks_that_come_later(world: World) -> None:
    instance = await world.deploy(target=1)
    async with (
        world.listening() as client,
        client.stream("GET", f"/deployments/{instance}/logs?follow=true", headers=NDJSON) as response,
    ):
        rows = _rows(response.aiter_lines())
        await world.runtime.write(instance, 0, "alone")
        assert (await anext(rows))["line"] == "alone"
        await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 2})
        await world.until(instance, lambda d: d.status.ready == 2)
        await world.runtime.write(instance, 1, "joined")
        row = await anext(rows)
        assert (row["rank"], row["line"]) == (1, "joined")
        await world.end(instance, 0, 0)
        assert [row async for row in rows] == []


@story
async def test_following_goes_on_from_a_cursor_or_from_the_tail(world: World) -> None:
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, "a", "b")
    path = f"/deployments/{instance}/logs?follow=true&rank=0"
    async with world.listening() as client:
        async with client.stream("GET", path + "&since=0@0:1") as response:
            assert await anext(response.aiter_lines()) == "b"
        async with client.stream("GET", path + "&tail=0") as response:
            await world.runtime.write(instance, 0, "c")
            assert await anext(response.aiter_lines()) == "c"


@story
async def test_each_line_comes_once_to_whoever_resumes_again_and_again(world: World) -> None:
    instance = await world.deploy(target=2)
    cursors: dict[int, str] = {}
    seen: list[str] = []
    async with world.listening() as client:
        for step in range(5):
            await world.runtime.write(instance, step % 2, f"line {step}")
            params = {"follow": "true", "since": ",".join(cursors.values())}
            async with client.stream("GET", f"/deployments/{instance}/logs", params=params, headers=NDJSON) as response:
                row = await anext(_rows(response.aiter_lines()))
                cursors[row["rank"]] = row["cursor"]
                seen.append(row["line"])
    assert seen == [f"line {step}" for step in range(5)]


@story
async def test_the_log_of_an_ended_run_can_be_followed_to_its_end(world: World) -> None:
    instance = await world.deploy(target=2)
    await world.runtime.write(instance, 0, "a")
    await world.runtime.write(instance, 1, "b")
    await world.end(instance, 0, 0)
    answer = await world.ann.get(f"/deployments/{instance}/logs?follow=true")
    assert answer.text == "0| a\n1| b\n"


@story
async def test_following_a_run_that_is_deleted_ends(world: World) -> None:
    instance = await world.deploy(target=1)
    async with (
        world.listening() as client,
        client.stream("GET", f"/deployments/{instance}/logs?follow=true&rank=0") as response,
    ):
        await world.ann.delete(f"/deployments/{instance}", params={"wait": 20})
        assert [line async for line in response.aiter_lines()] == []


@pytest.mark.parametrize(
    "query",
    [
        "rank=-1",
        "rank=8",
        "rank=x",
        "rank=1.5",
        "rank=" + "9" * 5000,
        "tail=-1",
        "tail=4294967296",
        "tail=all",
        "follow=maybe",
        "since=x",
        "since=0@x",
        "since=0@x&follow=true",
        "since=99@0:1",
        "since=0@",
        "since=@1",
        "since=-1@0:0",
        "since=0@0:1,,",
        "since=%D9%A3@0:1",
    ],
)
@story
async def test_junk_is_400_also_where_a_stream_was_asked_for(world: World, query: str) -> None:
    await world.deploy(target=1)
    error_of(await world.ann.get(f"/deployments/train/logs?{query}"), 400, "BASILICA_API_INVALID_REQUEST")


@story
async def test_a_flood_of_lines_reaches_a_slow_reader_whole(world: World) -> None:
    instance = await world.deploy(target=2)
    lines = [f"{number} {'x' * 200}" for number in range(5000)]
    async with (
        world.listening() as client,
        client.stream("GET", f"/deployments/{instance}/logs?follow=true", headers=NDJSON) as response,
    ):
        for rank in range(2):
            for start in range(0, len(lines), 100):
                await world.runtime.write(instance, rank, *lines[start : start + 100])
        await asyncio.sleep(0)
        world.runtime.exit(instance, 0, 0)
        world.runtime.exit(instance, 1, 0)
        rows = [row async for row in _rows(response.aiter_lines())]
    for rank in range(2):
        assert [row["line"] for row in rows if row["rank"] == rank] == lines


async def _rows(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        yield json.loads(line)
