"""The published client, each version in its own environment, in front of a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.official.fixtures import Stage, on_a_cluster, seen, telling, version
from tests.e2e.server import LastingServer
from tests.support import probes

__all__ = ["on_a_cluster", "seen", "telling", "version"]

AT_ONCE = 16  # most of what stories take is the client's own waiting between two looks


@pytest.fixture(scope="session")
def stage(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp(f"server-{version}")
    server = LastingServer(directory / "state", env=probes.path_with(probes.QUICK, directory / "quick"))
    yield Stage(server, Path(__file__).parent, AT_ONCE, on_a_cluster=False)
    server.close()
