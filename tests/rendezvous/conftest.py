"""Both servers, once for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rendezvous.harness import Address, OurServer, real_etcd
from tests.runtime_local.conftest import pytest_pyfunc_call  # noqa: F401 - tests may be coroutines here as well


@pytest.fixture(scope="session")
def etcd() -> Iterator[Address]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, real_etcd(Path(folder) / "data") as address:
        yield address


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OurServer]:
    server = OurServer(tmp_path_factory.mktemp("ours"))
    server.fresh(3)
    yield server
    server.stop()
