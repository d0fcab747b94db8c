"""What the tests of the command line share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, serving


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def server(state: Path) -> Iterator[Server]:
    with serving(state) as running:
        yield running
