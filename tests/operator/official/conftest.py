"""The published client in front of an installation on a cluster: the stories of tests/e2e/official, told again."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.e2e.official.telling import Telling
from tests.e2e.server import LastingServer
from tests.operator.whole import Installation

VERSIONS = ("0.36.8", "0.29.0")


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def telling_of_the_cluster(
    request: pytest.FixtureRequest, version: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Telling]:
    directory = tmp_path_factory.mktemp(f"official-{version}")
    wanted = [
        _story(item)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and "telling_of_the_cluster" in item.fixturenames
        and item.callspec.params.get("version") == version
    ]
    here = Installation(directory / "installation")
    try:
        # Pods are slower to start than processes: fewer stories at once leave them the time that the client gives.
        telling = Telling(version, cast(LastingServer, here), wanted, directory, at_once=6)
        yield telling
        telling.close()
    finally:
        here.close()


@pytest.fixture
def seen(request: pytest.FixtureRequest, telling_of_the_cluster: Telling) -> Any:
    """What the story of this test's name saw."""
    assert isinstance(request.node, pytest.Function)
    return telling_of_the_cluster.seen(_story(request.node))


def _story(test: pytest.Function) -> str:
    return test.originalname.removeprefix("test_")
