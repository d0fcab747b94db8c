"""Paths and methods, also those that the official client makes of odd names."""

import httpx2
import pytest

from tests.support.world import World, error_of, story

PATHS_OF_ODD_NAMES = [
    "/",
    "/deployments/",
    "/deployments/a/b",
    "/deployments//",
    "/deployments/a/",
    "/deployments/train/events/",
    "/deployments/%2e%2e",
    "/deployments/a%2Fb",
    "/deployments/%C3%BC",
    "/deployments/a%20b",
    "/deployments/%00",
    "/deployments/%FF",
    "/deployments/%ED%A0%80",
    "/deployments/...",
    "/deployments/" + "x" * 10_000,
    "/no/such/path",
    "/docs",
    "/deployments/train/metrics",
]


@pytest.mark.parametrize("path", PATHS_OF_ODD_NAMES)
@story
async def test_what_is_not_there_is_404_with_a_body_that_clients_can_read(world: World, path: str) -> None:
    error = error_of(await world.ann.get(httpx2.URL("http://world", raw_path=path.encode())), 404)
    assert error["code"] == "BASILICA_API_NOT_FOUND"
    assert len(error["message"]) < 500


@pytest.mark.parametrize("path", ["/deployments/", "/deployments/a/b", "/deployments/..", "/deployments/a?b", "/"])
@story
async def test_so_it_is_on_a_socket(world: World, path: str) -> None:
    async with world.listening() as client:
        answer = await client.get(httpx2.URL(str(client.base_url), raw_path=path.encode()))
        error_of(answer, 404, "BASILICA_API_NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/deployments", "GET, POST"),
        ("PATCH", "/deployments/train", "DELETE, GET"),
        ("GET", "/deployments/train/cancel", "POST"),
        ("PUT", "/deployments/train/share-token", "DELETE, GET, POST"),
        ("POST", "/health", "GET"),
        ("OPTIONS", "/deployments", "GET, POST"),
        ("DELETE", "/deployments", "GET, POST"),
        ("TRACE", "/usage", "GET"),
    ],
)
@story
async def test_a_method_that_a_path_does_not_have_is_405_with_those_that_it_has(
    world: World, method: str, path: str, allowed: str
) -> None:
    answer = await world.ann.request(method, path)
    error_of(answer, 405, "BASILICA_API_BAD_REQUEST")
    assert answer.headers["allow"] == allowed


@story
async def test_an_instance_name_comes_before_a_friendly_name(world: World) -> None:
    first = await world.deploy("train", target=1)
    second = await world.deploy(first, target=1)
    assert (await world.ann.get(f"/deployments/{first}")).json()["friendlyName"] == "train"
    assert (await world.ann.get(f"/deployments/{second}")).json()["friendlyName"] == first
