"""Results, archives, reruns and commands beside ranks, as the API has them."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest

from basilica.core.errors import BadResult, RuntimeUnavailable
from basilica.ports import Exited, Output, Run, StoredArchive
from basilica.server.middleware import MAX_ARCHIVE
from tests.support.world import World, a_request, error_of, key_of, story

# ---- results --------------------------------------------------------------------------------------------------------


@story
async def test_results_come_by_rank_and_those_that_are_missing_are_absent(world: World) -> None:
    instance = await world.deploy("train", target=3)
    assert (await world.ann.get("/deployments/train/results")).json() == {"results": {}}
    world.runtime.result_files[instance] = {0: b'{"loss": 0.5}', 2: b" null\n", 10: b'"\xc3\xbc"'}
    answer = await world.ann.get("/deployments/train/results")
    assert answer.json() == {"results": {"0": {"loss": 0.5}, "2": None, "10": "ü"}}
    error_of(await world.bob.get("/deployments/train/results"), 404)


@story
async def test_not_a_number_comes_back_as_python_writes_it(world: World) -> None:
    instance = await world.deploy("train", target=1)
    world.runtime.result_files[instance] = {0: b"[NaN, -Infinity]"}
    value = (await world.ann.get("/deployments/train/results")).json()["results"]["0"]
    assert value[0] != value[0]
    assert value[1] == float("-inf")


@story
async def test_a_result_that_cannot_be_given_is_named_with_its_rank_and_hides_no_other(world: World) -> None:
    instance = await world.deploy("train", target=2)
    for text in (b"{", b"", b"\xff", b"[" * 100_000):
        world.runtime.result_files[instance] = {0: b"1", 1: text}
        found = (await world.ann.get("/deployments/train/results")).json()
        assert found == {"results": {"0": 1}, "problems": {"1": "is no JSON"}}
    world.runtime.result_files[instance] = {0: BadResult(0, "is a FIFO, not a regular file"), 1: b"2"}
    found = (await world.ann.get("/deployments/train/results")).json()
    assert found == {"results": {"1": 2}, "problems": {"0": "is a FIFO, not a regular file"}}
    world.runtime.result_files[instance] = {0: b"1"}
    assert (await world.ann.get("/deployments/train/results")).json() == {"results": {"0": 1}}


# ---- archives -------------------------------------------------------------------------------------------------------


@story
async def test_an_archive_is_sent_first_and_named_after(world: World) -> None:
    kept = (await world.ann.put("/archives", content=b"some bytes")).json()
    assert kept["bytes"] == 10
    digest = kept["archive"]
    answer = await world.ann.post("/deployments", json=a_request("train", workdirArchive=digest, workdir="sub"))
    assert answer.status_code == 201
    spec = (await world.store.get(answer.json()["instanceName"])).spec
    assert (spec.archive, spec.workdir) == (digest, "sub")


@story
async def test_an_archive_that_is_not_there_is_refused(world: World) -> None:
    digest = (await world.bob.put("/archives", content=b"his")).json()["archive"]
    error = error_of(await world.ann.post("/deployments", json=a_request("train", workdirArchive=digest)), 400)
    assert error["details"] == {"field": "workdirArchive"}
    assert "send it with PUT /archives first" in error["message"]
    for wrong in ("abc", "../../etc", digest.upper()):
        error_of(await world.ann.post("/deployments", json=a_request("train", workdirArchive=wrong)), 400)
    assert (await world.ann.get("/deployments")).json()["total"] == 0


@story
async def test_a_workdir_lies_within_the_archive(world: World) -> None:
    digest = (await world.ann.put("/archives", content=b"some bytes")).json()["archive"]
    for workdir in ("/abs", "../up", "a/../../b"):
        request = a_request("train", workdirArchive=digest, workdir=workdir)
        error = error_of(await world.ann.post("/deployments", json=request), 400)
        assert error["details"] == {"field": "workdir"}


@story
async def test_an_archive_may_be_larger_than_other_bodies_but_has_a_limit(world: World) -> None:
    async def many(chunks: int) -> AsyncIterator[bytes]:
        for _ in range(chunks):
            yield b"x" * (1 << 20)

    assert (await world.ann.put("/archives", content=many(5))).json()["bytes"] == 5 << 20
    error_of(await world.ann.post("/deployments", content=b"x" * (5 << 20)), 413)
    headers = {"Content-Length": str(MAX_ARCHIVE + 1)}
    error_of(await world.ann.put("/archives", content=b"x", headers=headers), 413)
    error_of(await world.stranger.put("/archives", content=b"x"), 401)


@story
async def test_an_upload_that_breaks_off_is_nobodys_fault(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()
    keep = world.runtime.store_archive

    async def noting(user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        try:
            return await keep(user, chunks)
        finally:
            ended.set()

    world.runtime.store_archive = noting  # type: ignore[method-assign]
    async with world.listening() as client:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"PUT /archives HTTP/1.1\r\nAuthorization: Bearer {key_of('ann')}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode() + b"x")
        writer.close()
        await ended.wait()
    assert world.runtime.archives == {}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@story
async def test_archives_that_no_run_uses_are_forgotten_after_a_day(world: World) -> None:
    used, unused, fresh = [
        (await world.ann.put("/archives", content=text)).json()["archive"] for text in (b"1", b"2", b"3")
    ]
    await world.ann.post("/deployments", json=a_request("train", workdirArchive=used))
    for digest in (used, unused):
        world.runtime.archives["ann", digest] -= 86401
    assert await world.plane.retention.forget_archives() == [unused]
    assert world.runtime.archives.keys() == {("ann", used), ("ann", fresh)}


# ---- once more ------------------------------------------------------------------------------------------------------


@story
async def test_a_rerun_is_a_new_run_of_the_same_spec(world: World) -> None:
    digest = (await world.ann.put("/archives", content=b"some bytes")).json()["archive"]
    request = a_request("train", target=2, secrets={"TOKEN": "s3cret"}, workdirArchive=digest)
    first = (await world.ann.post("/deployments", json=request)).json()["instanceName"]
    await world.until(first, lambda d: d.status.ready == 2)
    await world.ann.post("/deployments/train/scale-distributed", json={"target": 3})
    await world.ann.post("/deployments/train/restart")
    await world.ann.post("/deployments/train/cancel")
    await world.settled(first)
    answer = await world.ann.post(f"/deployments/{first}/rerun", headers={"Idempotency-Key": "k"})
    assert answer.status_code == 201
    again = answer.json()["instanceName"]
    assert again != first
    assert answer.json()["friendlyName"] == "train"
    spec = (await world.store.get(again)).spec
    assert (spec.generation, spec.gang, spec.wanted.value, spec.world.target) == (1, 0, "run", 3)
    assert (spec.secrets, spec.archive) == ({"TOKEN": "s3cret"}, digest)
    same = await world.ann.post(f"/deployments/{first}/rerun", headers={"Idempotency-Key": "k"})
    assert same.json()["instanceName"] == again
    await world.until(again, lambda d: d.status.ready == 3)


@story
async def test_a_live_run_is_not_run_once_more(world: World) -> None:
    await world.deploy("train", target=1)
    error_of(await world.ann.post("/deployments/train/rerun"), 409, "NameInUse")
    error_of(await world.bob.post("/deployments/train/rerun"), 404)


# ---- commands -------------------------------------------------------------------------------------------------------


@story
async def test_a_command_answers_with_what_it_writes_and_its_exit_code(world: World) -> None:
    await world.deploy("train", target=2)
    answer = await world.ann.post("/deployments/train/exec", json={"rank": 1, "command": ["python", "-V"]})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == [{"stream": "stdout", "text": "python -V\n"}, {"exitCode": 0}]


@story
async def test_a_command_that_makes_no_sense_is_refused(world: World) -> None:
    await world.deploy("train", target=1)
    url = "/deployments/train/exec"
    error_of(await world.ann.post(url, json={"rank": 5, "command": ["a"]}), 409, "Conflict")
    for body in (
        {"rank": 8, "command": ["a"]},
        {"rank": 0, "command": []},
        {"rank": 0, "command": [""]},
        {"rank": 0, "command": ["a\0"]},
        {"rank": 0, "command": "a"},
        {"rank": 0},
        {"rank": -1, "command": ["a"]},
    ):
        error_of(await world.ann.post(url, json=body), 400)
    error_of(await world.bob.post(url, json={"rank": 0, "command": ["a"]}), 404)


class Endless:
    """A command that goes on until it is ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        try:
            yield Output("stdout", "")
            yield Output("stdout", "here")
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@story
async def test_a_command_ends_when_its_reader_goes_away(world: World) -> None:
    command = Endless()
    world.runtime.execute = command.execute  # type: ignore[method-assign]
    async with world.listening() as client:
        await world.deploy("train", target=1)
        async with client.stream("POST", "/deployments/train/exec", json={"rank": 0, "command": ["a"]}) as answer:
            assert await anext(answer.aiter_lines()) == '{"stream":"stdout","text":"here"}'
        await command.ended.wait()


@story
async def test_a_command_that_is_lost_sight_of_says_why_and_has_no_exit_code(world: World) -> None:
    async def execute(run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        yield Output("stdout", "")
        yield Output("stdout", "here")
        raise RuntimeUnavailable("its connection is lost")

    world.runtime.execute = execute  # type: ignore[method-assign]
    await world.deploy("train", target=1)
    answer = await world.ann.post("/deployments/train/exec", json={"rank": 0, "command": ["a"]})
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"stream": "stdout", "text": "here"},
        {"stream": "stderr", "text": "basilica: its connection is lost\n"},
    ]


@story
async def test_a_command_ends_when_the_server_does(world: World) -> None:
    command = Endless()
    world.runtime.execute = command.execute  # type: ignore[method-assign]
    async with world.listening() as client:
        await world.deploy("train", target=1)
        async with client.stream("POST", "/deployments/train/exec", json={"rank": 0, "command": ["a"]}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            world.closing.set()
            assert [json.loads(line)["text"] async for line in lines] == [
                "basilica: the server is going away, and the command was ended with it\n"
            ]
        await command.ended.wait()


@pytest.mark.parametrize("path", ["exec", "logs", "watch"])
@story
async def test_a_silent_answer_ends_with_the_key_that_it_was_asked_for_with(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("basilica.server.streams.ASK_AGAIN_SECONDS", 0.05)
    command = Endless()
    world.runtime.execute = command.execute  # type: ignore[method-assign]
    await world.deploy("train", target=1)
    await world.runtime.write((await world.ann.get("/deployments/train")).json()["instanceName"], 0, "a line")
    asked = {
        "exec": ("POST", "/deployments/train/exec", {"rank": 0, "command": ["a"]}),
        "logs": ("GET", "/deployments/train/logs?follow=true", None),
        "watch": ("GET", "/deployments/train/watch", None),
    }
    method, url, body = asked[path]
    async with world.listening() as client, client.stream(method, url, json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        key = next(key for key in await world.keys.keys() if key.user == "ann")
        assert await world.keys.revoke_key(key.id)
        rest = [line async for line in lines]
    if path == "exec":
        await command.ended.wait()
        text = "basilica: the key or the session of this request has ended, and the command was ended\n"
        assert [json.loads(line)["text"] for line in rest] == [text]
