"""Servers for end-to-end tests: real processes, each with a state directory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import LastingServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LastingServer]:
    """A running server of this test alone; afterwards nothing of it may be left."""
    server = LastingServer(tmp_path / "state")
    yield server
    server.close()
