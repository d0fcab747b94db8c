"""Both servers, once for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.rendezvous.harness import Address, OurServer, etcd_in_memory
from tests.runtime_local.conftest import pytest_pyfunc_call  # noqa: F401 - tests may be coroutines here as well


@pytest.fixture(scope="session")
def etcd() -> Iterator[Address]:
    with etcd_in_memory() as address:
        yield address


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OurServer]:
    server = OurServer(tmp_path_factory.mktemp("ours"))
    server.fresh(3)
    yield server
    server.stop()
