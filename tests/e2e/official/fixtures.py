"""Fixtures of every directory that tells the stories: its conftest imports them, and makes the `stage`.

A test `test_x(seen)` asserts on what the story `x` of `stories/` saw. All stories that the session needs of a
directory are told by one client process per version, side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.official.telling import ControlPlane, Telling

VERSIONS = ("0.36.8", "0.29.0")


@dataclass(frozen=True)
class Stage:
    """Where stories are told: to whom, for the tests in which directory, and how many at once."""

    server: ControlPlane
    tests: Path
    at_once: int
    on_a_cluster: bool


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def telling(
    request: pytest.FixtureRequest, version: str, stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Telling]:
    wanted = [
        _story(item)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path.is_relative_to(stage.tests)
        and "telling" in item.fixturenames
        and item.callspec.params.get("version") == version
    ]
    directory = tmp_path_factory.mktemp(f"official-{version}")
    telling = Telling(version, stage.server, wanted, directory, at_once=stage.at_once)
    yield telling
    telling.close()


@pytest.fixture
def seen(request: pytest.FixtureRequest, telling: Telling) -> Any:
    """What the story of this test's name saw."""
    assert isinstance(request.node, pytest.Function)
    return telling.seen(_story(request.node))


@pytest.fixture(scope="session")
def on_a_cluster(stage: Stage) -> bool:
    """What is different there is said by the test that sees it."""
    return stage.on_a_cluster


def _story(test: pytest.Function) -> str:
    return test.originalname.removeprefix("test_")
