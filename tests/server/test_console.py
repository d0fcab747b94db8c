"""The console's page and its sessions: one-time links, cookies, what they open and what they do not."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from basilica.core.errors import StoreUnavailable
from basilica.ports import ApiKey
from basilica.server import page as page_module
from basilica.server import streams
from basilica.server.sessions import LINK_SECONDS, LINKS_KEPT, SESSION_SECONDS, SESSIONS_KEPT, Sessions
from tests.support.world import Sse, World, a_request, error_of, key_of, story

OURS = {"X-Basilica-Console": "1"}
KEY = ApiKey(id="1", user="ann", digest="d", created_at=0.0)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def shift(self) -> float:
        return 0.0


@asynccontextmanager
async def logged_in(world: World, who: httpx2.AsyncClient | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser with a session: ann's, or of whom it is told."""
    link = (await (who or world.ann).post("/console/login-links")).json()["path"]
    async with world.client(None) as browser:
        answer = await browser.get(link)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        yield browser


# ---- the page --------------------------------------------------------------------------------------------------------


@story
async def test_the_page_is_served_to_everybody_under_a_strict_policy(world: World) -> None:
    answer = await world.stranger.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'self'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@story
async def test_every_file_is_asked_for_again_and_sent_once(world: World) -> None:
    names = [path.name for path in page_module.FILES.iterdir()]
    assert "app.js" in names
    for name in names:
        first = await world.stranger.get(f"/console/assets/{name}")
        assert first.status_code == 200, name
        assert first.headers["cache-control"] == "no-cache"
        known = {"If-None-Match": f'"other", W/{first.headers["etag"]}'}
        again = await world.stranger.get(f"/console/assets/{name}", headers=known)
        assert (again.status_code, again.content) == (304, b"")
        other = await world.stranger.get(f"/console/assets/{name}", headers={"If-None-Match": '"other"'})
        assert other.content == first.content


@pytest.mark.parametrize("name", ["..%2Fapp.py", "%2e%2e", "nothing.js", "x" * 5000, "index.html%00"])
@story
async def test_there_are_no_other_files(world: World, name: str) -> None:
    error_of(await world.stranger.get(f"/console/assets/{name}"), 404)


def test_nothing_comes_from_elsewhere_and_nothing_is_written_as_markup() -> None:
    for path in page_module.FILES.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert way not in text, f"{way} in {path.name}"


def test_every_module_that_is_imported_is_there() -> None:
    names = {path.name for path in page_module.FILES.iterdir()}
    for path in page_module.FILES.glob("*.js"):
        for found in re.findall(r'from "\./([\w.]+)"', path.read_text()):
            assert found in names, f"{path.name} imports {found}"


# ---- logging in ------------------------------------------------------------------------------------------------------


@story
async def test_a_link_logs_in_once(world: World) -> None:
    link = (await world.ann.post("/console/login-links")).json()["path"]
    async with world.client(None) as browser, world.client(None) as thief:
        answer = await browser.get(link)
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert answer.headers["cache-control"] == "no-store"
        assert (await browser.get("/console/session")).json()["user"] == "ann"
        again = await thief.get(link)
        assert again.headers["location"] == "/#/link-used-up"
        assert "set-cookie" not in again.headers
        error_of(await thief.get("/console/session"), 401)
        assert (await browser.get(link)).headers["location"] == "/"  # by the history: in already


@story
async def test_over_tls_the_cookie_stays_there(world: World) -> None:
    link = (await world.ann.post("/console/login-links")).json()["path"]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(world.app), base_url="https://world") as browser:
        assert "Secure" in (await browser.get(link)).headers["set-cookie"]


@pytest.mark.parametrize("code", ["", "x", "x" * 200])
@story
async def test_a_code_that_never_was_opens_nothing(world: World, code: str) -> None:
    answer = await world.stranger.get("/console/login", params={"code": code})
    assert answer.headers["location"] == "/#/link-used-up"
    assert "set-cookie" not in answer.headers


@story
async def test_a_session_cannot_make_links(world: World) -> None:
    async with logged_in(world) as browser:
        error_of(await browser.post("/console/login-links", headers=OURS), 401, "BASILICA_API_AUTH_MISSING")


def test_links_and_sessions_end_by_themselves() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    late = sessions.offer(KEY)
    clock.time += LINK_SECONDS
    assert sessions.open(late.code) is None
    token = sessions.open(sessions.offer(KEY).code)
    assert token is not None
    clock.time += SESSION_SECONDS - 1
    assert sessions.find(token) is not None
    clock.time += 1
    assert sessions.find(token) is None


def test_neither_links_nor_sessions_fill_the_memory() -> None:
    sessions = Sessions(Clock())
    links = [sessions.offer(KEY) for _ in range(LINKS_KEPT + 5)]
    assert sessions.open(links[0].code) is None
    assert sessions.open(links[-1].code) is not None
    tokens = [sessions.open(sessions.offer(KEY).code) for _ in range(SESSIONS_KEPT + 5)]
    assert sessions.find(tokens[0] or "") is None
    assert sessions.find(tokens[-1] or "") is not None


def test_sessions_outlive_the_server_and_their_tokens_are_not_in_the_file(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "sessions.json"
    first = Sessions(clock, path)
    token = first.open(first.offer(KEY).code)
    assert token is not None
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    second = Sessions(clock, path)
    assert second.cookie == first.cookie
    assert second.find(token) == first.find(token) is not None
    second.close(token)
    assert Sessions(clock, path).find(token) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sessions": {"x": {}}}', '{"sessions": 5, "cookie": "c"}', "\udcff"])
def test_a_file_that_cannot_be_read_is_no_reason_not_to_serve(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sessions.json"
    path.write_text(text, errors="surrogateescape")
    sessions = Sessions(Clock(), path)
    token = sessions.open(sessions.offer(KEY).code)
    assert token is not None
    assert Sessions(Clock(), path).find(token) is not None


def test_a_disk_that_is_full_refuses_the_login(tmp_path: Path) -> None:
    sessions = Sessions(Clock(), tmp_path / "gone" / "sessions.json")
    with pytest.raises(StoreUnavailable, match="cannot write"):
        sessions.open(sessions.offer(KEY).code)


# ---- what a session may ----------------------------------------------------------------------------------------------


@story
async def test_a_session_sees_what_its_user_sees(world: World) -> None:
    await world.deploy("hers")
    await world.deploy("his", who=world.bob)
    async with logged_in(world) as browser:
        rows = (await browser.get("/deployments")).json()["deployments"]
        assert [row["friendlyName"] for row in rows] == ["hers"]
        error_of(await browser.get("/deployments/his"), 404)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"Origin": "http://world"}, 403),
        (OURS | {"Sec-Fetch-Site": "cross-site"}, 403),
        (OURS | {"Sec-Fetch-Site": "same-site"}, 403),
        (OURS, 200),
        (OURS | {"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
@story
async def test_another_page_cannot_change_anything(world: World, headers: dict[str, str], status: int) -> None:
    instance = await world.deploy(target=2)
    async with logged_in(world) as browser:
        answer = await browser.post(f"/deployments/{instance}/scale-distributed", json={"target": 3}, headers=headers)
        assert answer.status_code == status, answer.text
        created = await browser.post("/deployments", json=a_request("new"), headers=headers)
        assert created.status_code == (403 if status == 403 else 201)
        deleted = await browser.delete(f"/deployments/{instance}", headers=headers)
        assert deleted.status_code == status
    assert (await world.ann.get("/deployments/new")).status_code == (404 if status == 403 else 200)


@pytest.mark.parametrize("value", ["", "x", "x" * 100_000, "\xff\xfe", '"quoted; Path=/"', "a=b=c", "../../etc/passwd"])
@story
async def test_a_cookie_that_is_none_of_ours_opens_nothing(world: World, value: str) -> None:
    async with logged_in(world) as browser:
        [name] = browser.cookies.keys()
    cookie = f"{name}={value}; {name}".encode("latin-1")
    error_of(await world.stranger.get("/deployments", headers={b"Cookie": cookie}), 401)
    error_of(await world.stranger.get("/deployments", headers={"Cookie": "other=1; =; ;;"}), 401)


@story
async def test_logging_out_ends_the_session_for_everybody_who_has_its_cookie(world: World) -> None:
    async with logged_in(world) as browser:
        copy = dict(browser.cookies)
        error_of(await browser.post("/console/logout"), 403)
        assert (await browser.post("/console/logout", headers=OURS)).json() == {"loggedOut": True}
        async with world.client(None) as thief:
            thief.cookies.update(copy)
            error = error_of(await thief.get("/deployments"), 401)
            assert "basilica console" in error["message"]


@story
async def test_a_revoked_key_takes_its_sessions_along(world: World) -> None:
    async with logged_in(world) as hers, logged_in(world, world.bob) as his:
        assert (await hers.get("/deployments")).status_code == 200
        [key] = [key for key in await world.keys.keys() if key.user == "ann"]
        await world.keys.revoke_key(key.id)
        error_of(await hers.get("/deployments"), 401)
        assert (await his.get("/deployments")).status_code == 200


@story
@pytest.mark.parametrize("end", ["logout", "revoked"])
async def test_what_is_being_read_ends_with_the_session(world: World, end: str) -> None:
    instance = await world.deploy(target=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "ASK_AGAIN_SECONDS", 0.0)
        async with world.listening() as client, logged_in(world) as browser, asyncio.TaskGroup() as readers:
            cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in browser.cookies.items())}
            begun: asyncio.Queue[None] = asyncio.Queue()

            async def read(path: str) -> None:
                async with (
                    httpx2.AsyncClient(base_url=client.base_url, trust_env=False, timeout=20) as reader,
                    reader.stream("GET", path, headers=cookies) as response,
                ):
                    assert response.status_code == 200
                    async for _ in response.aiter_bytes():
                        begun.put_nowait(None)

            paths = ("/watch", f"/deployments/{instance}/watch", f"/deployments/{instance}/logs?follow=true")
            await world.runtime.write(instance, 0, "first")
            for path in paths:
                readers.create_task(read(path))
                await begun.get()
            if end == "logout":
                await browser.post("/console/logout", headers=OURS)
            else:
                [key] = [key for key in await world.keys.keys() if key.user == "ann"]
                await world.keys.revoke_key(key.id)
            await world.runtime.write(instance, 0, "second")
            await world.plane.scale("ann", instance, 2)


@story
async def test_a_key_counts_more_than_a_cookie(world: World) -> None:
    async with logged_in(world) as browser:
        answer = await browser.get("/console/session", headers={"Authorization": f"Bearer {key_of('bob')}"})
        assert answer.json()["user"] == "bob"
        error_of(await browser.get("/deployments", headers={"Authorization": "Bearer wrong"}), 401)


@story
async def test_every_answer_is_safe_in_a_browser(world: World) -> None:
    """With a cookie, a log is one click away: it must not be taken for a page."""
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, "<script>alert(1)</script>")
    async with logged_in(world) as browser:
        for path in (f"/deployments/{instance}/logs", "/deployments", "/deployments/none", "/nowhere"):
            answer = await browser.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
            assert answer.headers["cache-control"] == "no-store"


# ---- all runs as they change -----------------------------------------------------------------------------------------


async def changes(reader: "RunReader", done: Any) -> dict[str, Any]:
    while not done(reader):
        await reader.next()
    return reader.rows


class RunReader:
    """What a page knows after each event of the stream, and from which id it could go on."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.aiter_lines()
        self.rows: dict[str, Any] = {}
        self.id = 0

    async def next(self) -> Sse:
        fields: dict[str, str] = {}
        async for line in self._lines:
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                break
        data = json.loads(fields["data"])
        if "all" in data:
            self.rows = {name: row for name, row in self.rows.items() if name in data["all"]}
        self.rows |= {row["instanceName"]: row for row in data["runs"]}
        for name in data["deleted"]:
            self.rows.pop(name, None)
        self.id = int(fields.get("id", self.id))
        return Sse(fields["event"], self.id, data)


@story
async def test_the_stream_tells_of_all_runs_and_of_every_change(world: World) -> None:
    instance = await world.deploy("first")
    async with world.listening() as client, client.stream("GET", "/watch") as response:
        reader = RunReader(response)
        row = (await changes(reader, lambda r: r.id > 0))[instance]
        assert row["worldSize"] == {"ready": 2, "target": 2, "min": 1, "max": 8, "belowMinimum": False}
        assert row["lastEvent"]["reason"] == "WorldReady"
        assert row["usage"]["gpuSeconds"] == 0
        assert row["usage"]["until"] >= row["createdAt"]
        second = await world.deploy("second")
        await changes(reader, lambda r: r.rows.get(second, {}).get("phase") == "ready")
        await world.end(instance, 0, 0)
        await changes(reader, lambda r: r.rows[instance]["phase"] == "succeeded")
        await world.ann.delete(f"/deployments/{instance}?wait=5")
        assert list(await changes(reader, lambda r: instance not in r.rows)) == [second]


@story
async def test_another_users_runs_are_not_in_the_stream_nor_their_ends(world: World) -> None:
    async with world.listening() as client, client.stream("GET", "/watch") as response:
        reader = RunReader(response)
        his = await world.deploy("his", who=world.bob)
        await world.bob.delete(f"/deployments/{his}?wait=5")
        hers = await world.deploy("hers")
        told: list[Any] = []
        while hers not in reader.rows:
            told.append((await reader.next()).data)
        assert his not in json.dumps(told)


@story
async def test_a_reader_that_was_away_is_told_what_it_missed(world: World) -> None:
    stays, changed, deleted = [await world.deploy(name) for name in ("stays", "changed", "deleted")]
    async with world.listening() as client:
        async with client.stream("GET", "/watch") as response:
            reader = RunReader(response)
            await changes(reader, lambda r: r.id > 0 and len(r.rows) == 3)
        await world.end(changed, 0, 0)
        await world.ann.delete(f"/deployments/{deleted}?wait=5")
        new = await world.deploy("new")
        async with client.stream("GET", "/watch", headers={"Last-Event-ID": str(reader.id)}) as response:
            again = RunReader(response)
            again.rows, again.id = reader.rows, reader.id
            event = await again.next()
            assert {row["instanceName"] for row in event.data["runs"]} == {changed, new}
            assert set(again.rows) == {stays, changed, new}
            assert again.rows[changed]["phase"] == "succeeded"


@story
async def test_the_stream_ends_with_the_server_and_leaves_nothing(world: World) -> None:
    await world.deploy("any")
    asking = asyncio.create_task(world.ann.get("/watch"))
    while len(world.left_tasks()) < 4:
        await asyncio.sleep(0.005)
    world.closing.set()
    assert "event: runs" in (await asking).text


@story
async def test_more_runs_than_fit_into_one_message(world: World) -> None:
    for n in range(450):
        answer = await world.ann.post("/deployments", json=a_request(f"run-{n}", target=1))
        assert answer.status_code == 201
    async with world.listening() as client, client.stream("GET", "/watch") as response:
        reader = RunReader(response)
        await changes(reader, lambda r: r.id > 0)
        assert len(reader.rows) == 450


@pytest.mark.parametrize(("query", "headers"), [("since=-1", {}), ("since=x", {}), ("", {"Last-Event-ID": "x"})])
@story
async def test_junk_is_refused_before_the_stream_begins(world: World, query: str, headers: dict[str, str]) -> None:
    error_of(await world.ann.get(f"/watch?{query}", headers=headers), 400, "BASILICA_API_INVALID_REQUEST")
