"""What the tests of damaged and lost state share: a real server on a directory that is spoilt behind its back."""

from pathlib import Path

import pytest


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"
