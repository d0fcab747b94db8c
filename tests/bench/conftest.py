"""Two ends on the loopback, for tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.probes import Ends


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    yield ends
    ends.close()
