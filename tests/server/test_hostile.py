"""Input that nobody should send: each has one clear answer, none is a 5xx, and nothing is left of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from basilica.server.middleware import MAX_BODY
from basilica.server.protocol import MAX_HEAD
from tests.support.world import World, a_request, bearer, error_of, key_of, story

# ---- values ---------------------------------------------------------------------------------------------------------

NAMES = [
    "",
    " ",
    "A",
    "a_b",
    "a b",
    "a/b",
    "../etc",
    ".",
    "..",
    "a.b",
    "-a",
    "a-",
    "ü",
    "名前",
    "a\n",
    "a\0",
    "x" * 49,
    "😀",
]


@pytest.mark.parametrize("name", NAMES)
@story
async def test_a_name_that_cannot_be_a_host_name_is_refused(world: World, name: str) -> None:
    error = error_of(await world.ann.post("/deployments", json=a_request(name)), 400)
    assert error["details"] == {"field": "instanceName"}


@story
async def test_a_refused_name_comes_with_one_that_would_do(world: World) -> None:
    error = error_of(await world.ann.post("/deployments", json=a_request("My Run/7")), 400)
    assert "try 'my-run-7'" in error["message"]


def changed(path: str, value: Any) -> bytes:
    """A create request in which one field is replaced; `value` may be raw JSON text as bytes."""
    request = a_request("train")
    request["distributed"]["worldSize"] = {"min": 1, "target": 2, "max": 8}
    *parents, last = path.split(".")
    place = request
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = "@@"
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return json.dumps(request).encode().replace(b'"@@"', raw)


VALUES: list[tuple[str, Any]] = [
    ("distributed.worldSize.target", -1),
    ("distributed.worldSize.target", 0),
    ("distributed.worldSize.target", 9),
    ("distributed.worldSize.target", b"1.0"),
    ("distributed.worldSize.target", b"1e2"),
    ("distributed.worldSize.target", b"NaN"),
    ("distributed.worldSize.target", True),
    ("distributed.worldSize.target", "2"),
    ("distributed.worldSize.target", None),
    ("distributed.worldSize.max", 2**32 - 1),
    ("distributed.worldSize.max", 2**32),
    ("distributed.worldSize.max", b"1" + b"0" * 5000),
    ("distributed.worldSize.min", 3),
    ("distributed.worldSize", {}),
    ("distributed.worldSize", []),
    ("distributed.command", ""),
    ("distributed.command", " \n\t"),
    ("distributed.command", "echo \0"),
    ("distributed.command", "x" * (1 << 20)),
    ("distributed.command", ["echo"]),
    ("distributed.command", None),
    ("distributed.command", "auto"),
    ("distributed.maxRestarts", -1),
    ("distributed.maxRestarts", 10**9),
    ("distributed.graceSeconds", -0.5),
    ("distributed.graceSeconds", b"NaN"),
    ("distributed.graceSeconds", b"Infinity"),
    ("distributed.graceSeconds", b"-Infinity"),
    ("distributed.graceSeconds", b"1e308"),
    ("distributed.graceSeconds", b"1e400"),
    ("distributed.graceSeconds", "5"),
    ("distributed.deadlineSeconds", -1),
    ("distributed.startDeadlineSeconds", 1e18),
    ("distributed.resize", "shrink"),
    ("distributed.rendezvous.backend", "zookeeper"),
    ("distributed.rendezvous.port", 0),
    ("distributed.rendezvous.port", 65536),
    ("distributed.topologySpread.strategy", "random"),
    ("distributed.bench.mode", True),
    ("distributed.nccl.env", {"A": 1}),
    ("distributed.nccl.env", {"A=B": "1"}),
    ("distributed", []),
    ("distributed", "yes"),
    ("instanceName", 5),
    ("instanceName", None),
    ("instanceName", ["a"]),
    ("port", 0),
    ("port", -1),
    ("port", 70000),
    ("port", b"8080.5"),
    ("ttlSeconds", -1),
    ("ttlSeconds", b"NaN"),
    ("ttlSeconds", 10**30),
    ("replicas", -1),
    ("replicas", 2**32),
    ("args", "a string"),
    ("args", [1]),
    ("args", ["\0"]),
    ("args", ["x" * (128 << 10)]),
    ("command", "a string"),
    ("env", []),
    ("env", {"": "x"}),
    ("env", {"1A": "x"}),
    ("env", {"A=B": "x"}),
    ("env", {"Ä": "x"}),
    ("env", {"A": None}),
    ("env", {"A": "\0"}),
    ("env", {"A": "x" * (128 << 10)}),
    ("secrets", {"A": ["x"]}),
    ("workdir", "relative"),
    ("workdir", ""),
    ("workdir", "/a\0"),
    ("resources.cpu", 2),
    ("resources.cpu", "-1"),
    ("resources.cpu", "0"),
    ("resources.cpu", "nan"),
    ("resources.cpu", "1e3"),
    ("resources.cpu", "٣"),
    ("resources.cpu", "9" * 15 + "P"),
    ("resources.memory", "1"),
    ("resources.memory", "-1Gi"),
    ("resources.memory", "lots"),
    ("resources.memory", "999999999999999Pi"),
    ("resources.gpus.count", -1),
    ("resources.gpus.count", 5000),
    ("resources.gpus.model", "H100"),
    ("resources.gpus.minGpuMemoryGb", 0),
    ("resources.gpus", []),
]


@pytest.mark.parametrize(("path", "value"), VALUES)
@story
async def test_a_value_that_makes_no_sense_is_400_and_names_its_field(world: World, path: str, value: Any) -> None:
    answer = await world.ann.post("/deployments", content=changed(path, value))
    error = error_of(answer, 400)
    assert error["retryable"] is False
    assert len(error["message"]) < 1000
    if error["code"] == "WorldSizeOutOfBounds":
        assert path.startswith("distributed.worldSize")
    elif error["details"]["field"] != "body":  # a number that no parser takes has no field
        assert error["details"]["field"].startswith(path) or path.startswith(error["details"]["field"])
    assert (await world.ann.get("/deployments")).json()["total"] == 0


@story
async def test_more_ranks_than_a_user_may_have_is_a_question_of_quota(world: World) -> None:
    request = a_request("train", target=5000, max=5000)
    error_of(await world.ann.post("/deployments", json=request), 403, "QuotaExceeded")


@pytest.mark.parametrize("value", [b"-1", b"2.0", b'"2"', b"null", b"true", b"NaN", b"4294967296", b"1" * 400, b"[]"])
@story
async def test_a_size_that_is_no_number_is_400(world: World, value: bytes) -> None:
    await world.deploy("train", target=1)
    answer = await world.ann.post("/deployments/train/scale-distributed", content=b'{"target":' + value + b"}")
    error_of(answer, 400, "BASILICA_API_INVALID_REQUEST")
    assert (await world.ann.get("/deployments/train")).json()["distributed"]["generation"] == 1


# ---- bodies ---------------------------------------------------------------------------------------------------------

BODIES = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"{'instanceName': 'a'}",
    b"\xff\xfe\x00",
    b'{"instanceName": "\xff"}',
    b'{"instanceName": "\\ud800"}',
    b"\xef\xbb\xbf{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"{}{}",
    b"instanceName=train&image=x",
    b"--boundary\r\nContent-Disposition: form-data\r\n\r\n",
    "{}".encode("utf-16"),
    b"\0" * 1000,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
@story
async def test_a_body_that_is_not_the_json_we_need_is_400(world: World, body: bytes) -> None:
    for path in ("/deployments", "/deployments/train/scale-distributed", "/deployments/train/enroll-metadata"):
        answer = await world.ann.post(path, content=body)
        if path.endswith("enroll-metadata"):
            error_of(answer, 404)
        else:
            error = error_of(answer, 400, "BASILICA_API_INVALID_REQUEST")
            assert len(error["message"]) < 500


@story
async def test_routes_without_a_body_take_none_amiss(world: World) -> None:
    await world.deploy("train", target=1)
    for body in (b"", b"{}", b"\xff", b"[1"):
        assert (await world.ann.post("/deployments/train/restart", content=body)).status_code == 200
    assert (await world.ann.request("GET", "/deployments", content=b"{")).status_code == 200


@story
async def test_of_a_key_that_comes_twice_the_last_counts(world: World) -> None:
    raw = json.dumps(a_request("first")).encode().replace(b"{", b'{"instanceName": "zero", ', 1)
    assert (await world.ann.post("/deployments", content=raw)).json()["friendlyName"] == "first"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "", "junk;;="])
@story
async def test_json_is_taken_for_what_it_is_whatever_it_is_called(world: World, kind: str) -> None:
    raw = json.dumps(a_request("train")).encode()
    answer = await world.ann.post("/deployments", content=raw, headers={"Content-Type": kind})
    assert answer.status_code == 201


@story
async def test_a_hundred_thousand_variables_are_too_many_or_few_enough(world: World) -> None:
    many = {f"VARIABLE_{number:06}": "some value" for number in range(100_000)}
    error = error_of(await world.ann.post("/deployments", json=a_request("train", env=many)), 400)
    assert error["message"] == "env: together at most 1048576 bytes (got '100000 variables')"
    few = {f"V{number}": "" for number in range(100_000)}
    assert (await world.ann.post("/deployments", json=a_request("train", env=few))).status_code == 201


def ten_megabytes() -> bytes:
    return json.dumps(a_request("train", image="x" * 10_000_000)).encode()


@story
async def test_ten_megabytes_are_too_large_and_the_connection_goes_on(world: World) -> None:
    async with world.listening() as client:
        for _ in range(2):
            error = error_of(await client.post("/deployments", content=ten_megabytes()), 413)
            assert error["message"] == f"the body is larger than {MAX_BODY} bytes"
        assert (await client.get("/deployments")).json()["total"] == 0


@story
async def test_they_are_too_large_in_pieces_of_unknown_number_too(world: World) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = ten_megabytes()
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async with world.listening() as client:
        error_of(await client.post("/deployments", content=pieces()), 413)
        assert (await client.get("/deployments")).json()["total"] == 0


@story
async def test_a_body_just_below_the_limit_is_read(world: World) -> None:
    request = a_request("train", unknown="")
    request["unknown"] = "x" * (MAX_BODY - len(json.dumps(request)))
    assert len(json.dumps(request)) == MAX_BODY
    async with world.listening() as client:
        assert (await client.post("/deployments", content=json.dumps(request))).status_code == 201
        request["unknown"] += "x"
        error_of(await client.post("/deployments", content=json.dumps(request)), 413)


@story
async def test_whoever_leaves_in_the_middle_of_a_body_leaves_no_run(world: World) -> None:
    async with world.listening() as client:
        await client.get("/health")
        before = len(world.left_tasks())
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = (
            f"POST /deployments HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key_of('ann')}\r\nContent-Length: 500\r\n"
        )
        writer.write(head.encode() + b'\r\n{"instanceName": "train"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
        while len(world.left_tasks()) > before:
            await asyncio.sleep(0.005)
        assert (await client.get("/deployments")).json()["total"] == 0


# ---- below HTTP -----------------------------------------------------------------------------------------------------

HEADS = {
    "one long header": (b"GET /health HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD * 4), 431),
    "many headers": (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD, 431),
    "a long path": (b"GET /" + b"x" * (MAX_HEAD * 4), 431),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "two lengths": (b"POST /deployments HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "a length beyond all numbers": (b"POST /deployments HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a negative length": (b"POST /deployments HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
    "a length and pieces": (
        b"POST /deployments HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a piece of no size": (b"POST /deployments HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "no method": (b"FROB /health HTTP/1.1\r\n\r\n", 400),
}


@pytest.mark.parametrize("what", HEADS)
@story
async def test_what_is_no_request_is_refused_and_others_are_served(world: World, what: str) -> None:
    data, status = HEADS[what]
    async with world.listening() as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(data)
        line = await reader.readline()
        assert line.split()[1] == str(status).encode(), line
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length"))
        error = json.loads(await reader.readexactly(length))["error"]
        assert error.keys() >= {"code", "message", "timestamp", "retryable"}
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        assert (await client.get("/health")).status_code == 200


@story
async def test_a_head_that_is_large_and_not_too_large_is_read(world: World) -> None:
    async with world.listening() as client:
        answer = await client.get("/deployments", headers={"X-Large": "x" * (MAX_HEAD // 2)})
        assert answer.status_code == 200


@story
async def test_a_length_without_end_is_too_large_and_no_more(world: World) -> None:
    headers = {"Content-Length": "9" * 5000}
    error_of(await world.ann.post("/deployments", content=b"{}", headers=headers), 413)


@pytest.mark.parametrize("query", ["%00=%FF", "&&&===", "a" * 50_000, "?" * 100, "limit=1&limit=2", "%ED%A0%80"])
@story
async def test_a_query_that_nobody_asked_for_is_ignored(world: World, query: str) -> None:
    async with world.listening() as client:
        assert (await client.get(f"/deployments?{query}")).status_code == 200


@story
async def test_many_strangers_at_once_all_get_their_answer(world: World) -> None:
    async with world.listening() as client:
        keys = [key_of("ann"), "wrong", None]
        answers = await asyncio.gather(
            *(client.get("/deployments", headers=bearer(keys[n % 3]) or {"Authorization": ""}) for n in range(90))
        )
    assert [a.status_code for a in answers] == [200, 401, 401] * 30
