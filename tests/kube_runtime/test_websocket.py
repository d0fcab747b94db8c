"""Commands over a WebSocket whose server does what it likes: no made-up exit code, no hang, no memory without bound."""

import asyncio
import json
import ssl
import struct
import subprocess
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.events import Ping, Pong

from basilica.kube.client import api as kube_api
from basilica.kube.client import websocket
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.exec import execute, exit_code
from basilica.kube.client.websocket import Frames, Piece, WebSocketError
from tests.kube_runtime.hostile import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    V4,
    V5,
    Behaviour,
    Conversation,
    api_server,
    closing,
    message,
    unmasked,
)

POD = "/api/v1/namespaces/u-ada/pods/train-0"
SUCCESS = message(3, json.dumps({"metadata": {}, "status": "Success"}).encode())
SECONDS = 20.0


def failure(code: str) -> bytes:
    causes = {"causes": [{"reason": "ExitCode", "message": code}]}
    status = {"status": "Failure", "reason": "NonZeroExitCode", "message": "it failed", "details": causes}
    return json.dumps(status).encode()


async def everything(url: str, **access: Any) -> list[tuple[int, bytes] | int]:
    """All that comes of a command, pieces of one stream put together."""
    found: list[tuple[int, bytes] | int] = []
    async with KubeApi(url, **access) as api, aclosing(execute(api, POD, "rank", ["a", "b c"], stdin=True)) as output:
        async for piece in output:
            last = found[-1] if found else None
            if isinstance(last, tuple) and isinstance(piece, tuple) and last[0] == piece[0]:
                found[-1] = (piece[0], last[1] + piece[1])
            else:
                found.append(piece)
    return found


def told(behave: Behaviour) -> list[tuple[int, bytes] | int]:
    async def story() -> list[tuple[int, bytes] | int]:
        async with asyncio.timeout(SECONDS), api_server(behave) as url:
            return await everything(url)

    return asyncio.run(story())


def refused(behave: Behaviour) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        told(behave)
    return refusal.value


def agreed(*said: bytes) -> Behaviour:
    """A server that accepts, says that, and hangs up."""

    async def behave(talk: Conversation) -> None:
        await talk.agree()
        await talk.say(*said)

    return behave


# ---- frames, without a network ---------------------------------------------------------------------------------------

messages = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), max_size=4)


@given(messages, st.binary(max_size=125), st.data())
def test_messages_come_whole_however_they_are_cut(sent: list[list[bytes]], ping: bytes, data: st.DataObject) -> None:
    wire = b""
    for fragments in sent:
        for index, fragment in enumerate(fragments):
            opcode = BINARY if index == 0 else CONTINUATION
            wire += unmasked(opcode, fragment, final=index == len(fragments) - 1) + unmasked(PING, ping)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))
    parser, pings = Frames(), 0
    received: list[tuple[bytes, bool]] = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        for found in parser.feed(wire[start:end]):
            if not isinstance(found, Piece):
                assert isinstance(found, Ping)
                assert found.payload == ping
                pings += 1
            elif found.first:
                received.append((found.data, found.last))
            else:
                assert not received[-1][1], "a piece after the last"
                received[-1] = (received[-1][0] + found.data, found.last)
    assert received == [(b"".join(fragments), True) for fragments in sent]
    assert pings == sum(len(fragments) for fragments in sent)


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        (unmasked(TEXT, b"hello"), "a text message"),
        (unmasked(0x3, b""), "Invalid opcode 0x3"),
        (unmasked(0xB, b""), "Invalid opcode 0xb"),
        (b"\xc2\x00", "Reserved bit set unexpectedly"),
        (b"\x82\x80", "masked"),
        (unmasked(CONTINUATION, b"x"), "unexpected CONTINUATION"),
        (unmasked(BINARY, b"x", final=False) + unmasked(BINARY, b"y"), "expected CONTINUATION"),
        (unmasked(PING, b"x" * 126), "Control frame with payload len > 125"),
        (unmasked(PING, b"x", final=False), "fragment control frame"),
        (b"\x82\x7f" + b"\xff" * 8, "8-byte payload length with non-zero MSB"),
    ],
)
def test_what_is_no_websocket_is_refused(wire: bytes, problem: str) -> None:
    with pytest.raises(WebSocketError, match=problem):
        list(Frames().feed(wire))


def test_a_client_masks_what_it_says_by_a_key_of_its_own_each_time() -> None:
    frames = Frames()
    said = [frames.packed(Pong(payload=b"\0\1\2\3\4")) for _ in range(20)]
    assert {frame[:2] for frame in said} == {b"\x8a\x85"}
    keys = [frame[2:6] for frame in said]
    assert len(set(keys)) == len(keys)
    for frame, key in zip(said, keys, strict=True):
        assert bytes(byte ^ key[at % 4] for at, byte in enumerate(frame[6:])) == b"\0\1\2\3\4"


# ---- a command that goes well ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [V5, V4])
def test_streams_are_told_apart_and_the_code_comes_last(protocol: str) -> None:
    asked: list[str] = []

    async def behave(talk: Conversation) -> None:
        asked.append(talk.question)
        assert talk.headers["sec-websocket-protocol"] == f"{V5}, {V4}"
        assert talk.headers["upgrade"] == "websocket"
        more = message(1, b"") + message(1, b"out")  # in the packet of the answer itself
        await talk.agree(protocol, more=more)
        await talk.say(message(2, b"oh"), message(4, b"what?"), unmasked(BINARY, b""), message(1, b"more"))
        await talk.say(message(3, failure("3")), closing(1000))

    assert told(behave) == [(1, b"out"), (2, b"oh"), (1, b"more"), 3]
    method, target, _ = asked[0].split(" ")
    path, _, query = target.partition("?")
    assert (method, path) == ("GET", f"{POD}/exec")
    assert parse_qsl(query) == [
        *[("container", "rank"), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")],
        *[("command", "a"), ("command", "b c")],
    ]


def test_a_slow_drip_is_as_good_as_a_flood() -> None:
    async def behave(talk: Conversation) -> None:
        await talk.agree()
        for byte in message(1, b"x" * 200) + SUCCESS:
            await talk.say(bytes((byte,)))
            await asyncio.sleep(0)

    assert told(behave) == [(1, b"x" * 200), 0]


def test_pings_are_answered_also_inside_of_a_message() -> None:
    async def behave(talk: Conversation) -> None:
        await talk.agree()
        await talk.say(unmasked(BINARY, b"\x01he", final=False), unmasked(PING, b"you?"))
        assert await talk.hear() == (PONG, b"you?")
        await talk.say(unmasked(CONTINUATION, b"llo"), unmasked(PONG, b"unasked"), SUCCESS)
        assert (await talk.hear())[0] == CLOSE

    assert told(behave) == [(1, b"hello"), 0]


def test_a_silent_connection_is_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_EVERY_S", 0.05)

    async def lives(talk: Conversation) -> None:
        await talk.agree()
        for _ in range(websocket.PINGS_UNANSWERED + 2):  # more than would do for a dead one
            assert await talk.hear() == (PING, b"")
            await talk.say(unmasked(PONG, b""))
        await talk.say(SUCCESS)

    assert told(lives) == [0]

    async def is_dead(talk: Conversation) -> None:
        await talk.agree()
        while (await talk.hear())[0] == PING:
            pass

    assert "nothing came for 0.25 s" in str(refused(is_dead))


# ---- one that does not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (agreed(), "the connection was cut"),
        (agreed(message(1, b"some")[:4]), "the connection was cut"),
        (agreed(b"\x82"), "the connection was cut"),
        (agreed(b"\x82\x7f" + struct.pack("!Q", 1 << 62) + b"\x01" + b"x" * 1000), "the connection was cut"),
        (agreed(SUCCESS[:-1]), "the connection was cut"),
        (agreed(message(1, b"some"), closing(1001, "the node is drained")), "with code 1001: the node is drained"),
        (agreed(unmasked(CLOSE, b"")), "closed it without a reason"),
        (agreed(b"HTTP/1.1 200 OK\r\n\r\n"), "no WebSocket frame: "),
        (agreed(*[message(3, b"x" * 100_000)[:-1], b"x", unmasked(PING, b"")]), "cannot be told"),
    ],
)
def test_without_a_status_there_is_no_exit_code(behave: Behaviour, words: str) -> None:
    problem = refused(behave)
    assert words in str(problem)
    assert problem.status in (0, 500)


def test_a_status_without_end_is_not_collected() -> None:
    async def behave(talk: Conversation) -> None:
        await talk.agree()
        await talk.say(b"\x82\x7f" + struct.pack("!Q", 1 << 40) + b"\x03")
        while True:
            await talk.say(b" " * 100_000)

    assert "endless status" in str(refused(behave))


def test_much_output_is_not_held() -> None:
    """A frame of 200 MB passes through a few of memory, and a reader that waits makes the server wait."""
    size, written = 200 << 20, 0

    async def behave(talk: Conversation) -> None:
        nonlocal written
        await talk.agree()
        await talk.say(b"\x82\x7f" + struct.pack("!Q", size + 1) + b"\x01")
        for _ in range(size >> 16):
            await talk.say(bytes(1 << 16))
            written += 1 << 16
        await talk.say(SUCCESS)

    async def story() -> None:
        received, last = 0, 1
        async with (
            asyncio.timeout(60),
            api_server(behave) as url,
            KubeApi(url) as api,
            aclosing(execute(api, POD, "rank", ["yes"])) as output,
        ):
            await anext(output)
            before = -1
            while before != written:  # until the server is stuck: sockets hold some
                before = written
                await asyncio.sleep(0.2)
            assert written < size / 4
            async for found in output:
                if isinstance(found, int):
                    last = found
                else:
                    assert len(found[1]) <= websocket.READ_BYTES
                    received += len(found[1])
        assert size - websocket.READ_BYTES <= received < size
        assert last == 0

    tracemalloc.start()
    try:
        asyncio.run(story())
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def answered(text: str) -> Behaviour:
    async def behave(talk: Conversation) -> None:
        await talk.say(text.encode())

    return behave


@pytest.mark.parametrize(
    ("behave", "status", "words"),
    [
        (answered("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"), 403, "answered 403"),
        (answered('HTTP/1.1 404 Not Found\r\nContent-Length: 21\r\n\r\n{"message": "no pod"}'), 404, "no pod (404"),
        (answered("HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\ncontainer not found"), 500, "container not found"),
        (answered("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwhat"), 200, "what"),
        (
            answered("HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
            0,
            "not that of a WebSocket",
        ),
        (answered("SSH-2.0-OpenSSH_9.2\r\n"), 0, "no answer"),
        (answered(""), 0, "no answer"),
        (answered("HTTP/1.1 101"), 0, "no answer"),
        (answered("HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\nand"), 0, "no answer"),
    ],
)
def test_an_answer_that_is_no_websocket_is_told(behave: Behaviour, status: int, words: str) -> None:
    problem = refused(behave)
    assert problem.status == status
    assert words in str(problem)


def test_a_protocol_that_nobody_asked_for_is_refused() -> None:
    async def behave(talk: Conversation) -> None:
        await talk.agree("base64.channel.k8s.io")

    assert "speaks base64.channel.k8s.io, and not v5" in str(refused(behave))


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "ANSWER_S", 0.3)

    def dripping(text: str) -> Behaviour:
        async def behave(talk: Conversation) -> None:
            for letter in text:
                await talk.say(letter.encode())
                await asyncio.sleep(0.1)

        return behave

    for text in ("HTTP/1.1 101 Switching Protocols\r\n", "HTTP/1.1 500 Oh\r\nContent-Length: 99\r\n\r\n" + "x" * 99):
        started = asyncio.run(_after(dripping(text)))
        assert "no answer" in str(started)


async def _after(behave: Behaviour) -> ApiError:
    async with asyncio.timeout(SECONDS), api_server(behave) as url:
        try:
            await everything(url)
        except ApiError as error:
            return error
    raise AssertionError("it was taken for an answer")


@pytest.mark.parametrize(
    "status",
    [
        *[
            b"",
            b"\xff",
            b"[]",
            b"null",
            b"{}",
            b'{"status": "Failure"}',
            b'{"status": 7}',
            failure("many"),
            failure(""),
        ],
        b'{"status": "Failure", "reason": "NonZeroExitCode"}',
        b'{"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": []}}',
        b'{"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [7]}}',
    ],
)
def test_a_status_that_tells_no_code_is_an_error(status: bytes) -> None:
    with pytest.raises(ApiError, match="cannot be told"):
        exit_code(status)


def test_a_command_that_never_ran_is_the_servers_refusal() -> None:
    body = {"status": "Failure", "code": 500, "reason": "InternalError", "message": "no route to host"}
    with pytest.raises(ApiError, match="no route to host") as refusal:
        exit_code(json.dumps(body).encode())
    assert (refusal.value.status, refusal.value.reason) == (500, "InternalError")
    assert exit_code(failure("0137")) == 137


# ---- going away, and who one is --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_who_goes_says_goodbye_and_hangs_up(how: str) -> None:
    async def story() -> None:
        heard: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        async def behave(talk: Conversation) -> None:
            await talk.agree(more=message(1, b"up"))
            goodbye = await talk.hear()
            assert await talk.reader.read() == b"", "the connection goes on"
            heard.set_result(goodbye)

        async with asyncio.timeout(SECONDS), api_server(behave) as url, KubeApi(url) as api:
            output = execute(api, POD, "rank", ["sleep"])
            assert await anext(output) == (1, b"up")
            if how == "cancel":
                waiting = asyncio.ensure_future(anext(output))
                await asyncio.sleep(0.05)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            else:
                await output.aclose()
            assert await heard == (CLOSE, struct.pack("!H", 1000))

    asyncio.run(story())


def test_a_token_is_asked_for_each_time() -> None:
    async def story() -> None:
        seen: list[str] = []

        async def behave(talk: Conversation) -> None:
            seen.append(talk.headers["authorization"])
            await talk.agree()
            await talk.say(SUCCESS)

        tokens = iter(("first", "second"))
        async with asyncio.timeout(SECONDS), api_server(behave) as url, KubeApi(url, token=lambda: next(tokens)) as api:
            for _ in range(2):
                assert [code async for code in execute(api, POD, "rank", ["true"])] == [0]
        assert seen == ["Bearer first", "Bearer second"]

    asyncio.run(story())


Certify = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def certify(tmp_path_factory: pytest.TempPathFactory) -> Certify:
    """Makes a key and a certificate that vouches for itself."""
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str) -> tuple[Path, Path]:
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        return certificate, key

    return make


def test_it_goes_over_tls_with_a_certificate_of_the_client(certify: Certify) -> None:
    server_cert, server_key = certify("server")
    client_cert, client_key = certify("client")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(client_cert))
    serving.load_cert_chain(server_cert, server_key)
    serving.verify_mode = ssl.CERT_REQUIRED
    known = ssl.create_default_context(cafile=str(server_cert))
    known.load_cert_chain(client_cert, client_key)
    stranger = ssl.create_default_context(cafile=str(client_cert))

    async def behave(talk: Conversation) -> None:
        await talk.agree(more=message(1, b"x" * 300_000))
        await talk.say(unmasked(PING, b"you?"))
        assert await talk.hear() == (PONG, b"you?")
        await talk.say(SUCCESS)

    async def story(run: Callable[[str], Awaitable[None]]) -> None:
        async with asyncio.timeout(SECONDS), api_server(behave, serving) as url:
            await run(url)

    async def with_what_it_needs(url: str) -> None:
        assert await everything(url, verify=known) == [(1, b"x" * 300_000), 0]

    async def without_trust(url: str) -> None:
        with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await everything(url, verify=stranger)

    asyncio.run(story(with_what_it_needs))
    asyncio.run(story(without_trust))
