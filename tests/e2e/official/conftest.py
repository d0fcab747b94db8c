"""The published client, each version in its own environment, in front of a real server.

A test `test_x(seen)` asserts on what the story `x` of `stories/` saw. All stories that the session needs are told by
one client process per version, side by side.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.official.telling import Telling
from tests.e2e.server import LastingServer

VERSIONS = ("0.36.8", "0.29.0")


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def telling(
    request: pytest.FixtureRequest, version: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Telling]:
    directory = tmp_path_factory.mktemp(f"official-{version}")
    wanted = [
        _story(item)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and "telling" in item.fixturenames
        and item.callspec.params.get("version") == version
    ]
    server = LastingServer(directory / "state")
    try:
        telling = Telling(version, server, wanted, directory)
        yield telling
        telling.close()
    finally:
        server.close()


@pytest.fixture
def seen(request: pytest.FixtureRequest, telling: Telling) -> Any:
    """What the story of this test's name saw."""
    assert isinstance(request.node, pytest.Function)
    return telling.seen(_story(request.node))


def _story(test: pytest.Function) -> str:
    return test.originalname.removeprefix("test_")
