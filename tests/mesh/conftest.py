"""One etcd with the v2 API and one without for all tests here, and the environment of a rank."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mesh.peers import Etcd

Pod = Callable[..., None]


@pytest.fixture(scope="session")
def etcds() -> Iterator[dict[str, Etcd]]:
    with tempfile.TemporaryDirectory(prefix="basilica-etcd-") as folder:
        started: dict[str, Etcd] = {}
        try:
            for name in ("v2", "v3"):
                started[name] = Etcd(Path(folder) / name, v2=name == "v2")
                started[name].start()
            yield started
        finally:
            for etcd in started.values():
                etcd.stop()


@pytest.fixture(params=["v2", "v3"])
def etcd(request: pytest.FixtureRequest, etcds: dict[str, Etcd]) -> Etcd:
    etcd = etcds[request.param]
    etcd.reset()
    etcd.until_watchers(0)
    return etcd


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Pod:
    """Sets what a rank on `node` finds in its environment."""
    for name in ("NODE_NAME", "KUBERNETES_NODE_NAME", "BASILICA_RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    def enter(endpoint: str, node: str = "host-1") -> None:
        monkeypatch.setenv("NODE_NAME", node)
        monkeypatch.setenv("BASILICA_RDZV_ENDPOINT", endpoint)

    return enter
