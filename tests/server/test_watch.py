"""Watching a run: server-sent events and long polls."""

import asyncio

import httpx2
import pytest

from basilica.core.seen import Stalled
from basilica.server import streams
from tests.support.world import SseReader, World, error_of, story


@story
async def test_a_watcher_sees_the_state_at_once_and_every_change_until_the_end(world: World) -> None:
    instance = await world.deploy(target=2)
    async with (
        world.listening() as client,
        client.stream("GET", f"/deployments/{instance}/watch") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        reader = SseReader(response)
        first = await reader.next()
        assert (first.event, first.data["phase"]) == ("status", "ready")
        assert first.id == first.data["version"]
        world.runtime.exit(instance, 0, 0)
        await reader.until(lambda e: e.data["distributed"]["ranks"][0]["phase"] == "Succeeded")
        world.runtime.exit(instance, 1, 0)
        rest = await reader.rest()
        assert rest[-2].data["phase"] == "succeeded"
        assert rest[-2].data["distributed"]["settled"] is True
        assert (rest[-1].event, rest[-1].data) == ("end", {})
        versions = [first.id, *(e.id for e in rest)]
        assert versions == sorted(versions)


@story
async def test_a_rank_that_exits_wakes_its_watcher_without_anybody_asking(world: World) -> None:
    instance = await world.deploy(target=1)
    order: list[str] = []
    async with world.listening() as client, client.stream("GET", f"/deployments/{instance}/watch") as response:
        reader = SseReader(response)
        await reader.next()

        async def look() -> None:
            await reader.until(lambda e: e.data["phase"] == "succeeded")
            order.append("woken")

        looking = asyncio.create_task(look())
        order.append("exit")
        world.runtime.exit(instance, 0, 0)
        await looking
        order.append("asked")
    assert order == ["exit", "woken", "asked"]
    assert reader.comments == 0


@pytest.mark.parametrize("how", ["since", "Last-Event-ID"])
@story
async def test_a_watcher_resumes_after_what_it_has_seen(world: World, how: str) -> None:
    instance = await world.deploy(target=1)
    seen = (await world.store.get(instance)).version
    query, headers = ({"since": seen}, {}) if how == "since" else ({}, {how: str(seen)})
    async with (
        world.listening() as client,
        client.stream("GET", f"/deployments/{instance}/watch", params=query, headers=headers) as response,
    ):
        reader = SseReader(response)
        await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 2})
        first = await reader.next()
        assert first.id > seen
        assert first.data["distributed"]["worldSize"]["target"] == 2


@story
async def test_whoever_resumes_after_the_last_state_of_an_ended_run_is_told_the_end(world: World) -> None:
    instance = await world.deploy(target=1)
    last = await world.end(instance, 0)
    for since in (last.version, last.version + 1000):
        answer = await world.ann.get(f"/deployments/{instance}/watch", params={"since": since})
        assert answer.text.startswith("event: end\n")


@story
async def test_a_watcher_is_told_that_the_run_was_deleted(world: World) -> None:
    instance = await world.deploy(target=1)
    async with world.listening() as client, client.stream("GET", f"/deployments/{instance}/watch") as response:
        reader = SseReader(response)
        await reader.next()
        world.runtime.stubborn = True
        await world.ann.delete(f"/deployments/{instance}", params={"wait": 0})
        await reader.until(lambda e: e.data["state"] == "Terminating")
        await world.store.delete(instance)
        assert [e.event for e in await reader.rest()][-1] == "deleted"


@story
async def test_while_nothing_happens_the_connection_is_kept_alive(world: World) -> None:
    instance = await world.deploy(target=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)
        async with world.listening() as client, client.stream("GET", f"/deployments/{instance}/watch") as response:
            lines = response.aiter_lines()
            while await anext(lines) != ": still here":
                pass
            assert [await anext(lines) for _ in range(4)] == ["", ": still here", "", ": still here"]


@story
async def test_who_follows_reports_is_told_what_time_alone_changes(world: World) -> None:
    """For how long a rank has been silent: nothing else happens meanwhile."""
    instance = await world.deploy(target=1)
    world.runtime.stall(instance, 0, Stalled(since=world.clock.now() - 61, usual_step_seconds=1.0))
    stalled = await world.until(instance, lambda d: d.status.ranks[0].stalled is not None)
    path = f"/deployments/{instance}/watch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)
        async with (
            world.listening() as client,
            client.stream("GET", path, params={"reported_since": 0}) as response,
        ):
            reader = SseReader(response)
            first = await reader.next()
            assert "over 1 min" in first.data["distributed"]["blockedOn"]
            later = world.clock.now() + 3600
            patch.setattr(world.clock, "now", lambda: later)
            second = await reader.next()
    assert "over 1 h" in second.data["distributed"]["blockedOn"]
    assert first.id == second.id == stalled.version


@story
async def test_many_watchers_all_see_the_end(world: World) -> None:
    instance = await world.deploy(target=1)
    connected: asyncio.Queue[None] = asyncio.Queue()

    async with world.listening() as client:

        async def watch_to_the_end() -> str:
            async with client.stream("GET", f"/deployments/{instance}/watch") as response:
                reader = SseReader(response)
                await reader.next()
                connected.put_nowait(None)
                return (await reader.rest())[-2].data["phase"]  # type: ignore[no-any-return]

        watchers = [asyncio.create_task(watch_to_the_end()) for _ in range(50)]
        for _ in watchers:
            await connected.get()
        world.runtime.exit(instance, 0, 0)
        assert set(await asyncio.gather(*watchers)) == {"succeeded"}


@story
async def test_a_watcher_that_leaves_leaves_nothing_behind(world: World) -> None:
    instance = await world.deploy(target=1)
    async with world.listening() as client:
        await client.get("/health")
        before = len(world.left_tasks())
        for path in ("watch", "watch?since=999999", "logs?follow=true", "watch?wait=600&since=999999"):
            async with httpx2.AsyncClient(base_url=client.base_url, headers=client.headers) as leaving:
                asking = asyncio.create_task(leaving.get(f"/deployments/{instance}/{path}"))
                await _until(lambda: len(world.left_tasks()) > before + 1)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await _until(lambda: len(world.left_tasks()) <= before)
        assert world.runtime.followers == 0


# ---- long polls -----------------------------------------------------------------------------------------------------


@story
async def test_a_long_poll_returns_at_once_if_there_is_news(world: World) -> None:
    instance = await world.deploy(target=1)
    body = (await world.ann.get(f"/deployments/{instance}/watch", params={"wait": 600})).json()
    assert body["instanceName"] == instance


@story
async def test_a_long_poll_returns_with_the_change(world: World) -> None:
    instance = await world.deploy(target=1)
    version = (await world.store.get(instance)).version
    path = f"/deployments/{instance}/watch"
    asking = asyncio.create_task(world.ann.get(path, params={"wait": 600, "since": version}))
    await asyncio.sleep(0)
    await world.ann.post(f"/deployments/{instance}/scale-distributed", json={"target": 2})
    body = (await asking).json()
    assert body["version"] > version
    assert body["distributed"]["worldSize"]["target"] == 2


@story
async def test_a_long_poll_without_news_gives_the_run_as_it_is(world: World) -> None:
    instance = await world.deploy(target=1)
    version = (await world.store.get(instance)).version
    answer = await world.ann.get(f"/deployments/{instance}/watch", params={"wait": 0.01, "since": version})
    assert (answer.status_code, answer.json()["version"]) == (200, version)


@story
async def test_a_long_poll_of_a_run_that_is_deleted_meanwhile_is_404(world: World) -> None:
    instance = await world.deploy(target=1)
    version = (await world.store.get(instance)).version
    path = f"/deployments/{instance}/watch"
    asking = asyncio.create_task(world.ann.get(path, params={"wait": 600, "since": version + 10**6}))
    await asyncio.sleep(0)
    await world.ann.delete(f"/deployments/{instance}", params={"wait": 20})
    error_of(await asking, 404, "BASILICA_API_NOT_FOUND")


@story
async def test_a_server_that_closes_ends_streams_and_long_polls(world: World) -> None:
    instance = await world.deploy(target=1)
    world.runtime.stubborn = True
    version = (await world.store.get(instance)).version
    async with world.listening() as client:
        paths = ("watch", f"watch?wait=600&since={version + 10**6}", "logs?follow=true")
        *asking, following = [asyncio.create_task(client.get(f"/deployments/{instance}/{path}")) for path in paths]
        deleting = asyncio.create_task(client.delete(f"/deployments/{instance}?wait=600"))
        await world.until(instance, lambda d: d.spec.wanted == "delete")
        while not world.runtime.followers:
            await asyncio.sleep(0.01)
        world.closing.set()
        assert [a.status_code for a in await asyncio.gather(*asking)] == [200, 200]
        assert (await deleting).json()["state"] == "Terminating"
        with pytest.raises(httpx2.RemoteProtocolError):  # broken off: this was not all of the log
            await following


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("since=-1", {}),
        ("since=x", {}),
        ("since=" + "9" * 5000, {}),
        ("wait=-1", {}),
        ("wait=nan", {}),
        ("wait=inf", {}),
        ("wait=601", {}),
        ("", {"Last-Event-ID": "x"}),
        ("", {"Last-Event-ID": "-5"}),
    ],
)
@story
async def test_junk_is_refused_before_the_stream_begins(world: World, query: str, headers: dict[str, str]) -> None:
    await world.deploy(target=1)
    answer = await world.ann.get(f"/deployments/train/watch?{query}", headers=headers)
    error_of(answer, 400, "BASILICA_API_INVALID_REQUEST")


async def _until(holds: object) -> None:
    """Let everything else run until it holds; the story's own limit ends a wait that is in vain."""
    assert callable(holds)
    while not holds():
        await asyncio.sleep(0.005)
