"""The published client in front of an installation on a cluster: the stories of tests/e2e/official, told again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from basilica.kube.manifests.run import GPUS, PROVIDER
from basilica_testkube import NodeSpec
from tests.e2e.official.fixtures import Stage, on_a_cluster, seen, telling, version
from tests.operator.whole import Installation
from tests.support import probes

__all__ = ["on_a_cluster", "seen", "telling", "version"]

AT_ONCE = 8  # a pod is a few processes, and the client gives a run 15 s to be up
NODE = NodeSpec("node-0", labels={PROVIDER: "cyan"}, capacity={GPUS: "8"})  # what stories ask for
LEASE_SECONDS = 2.0  # where an operator takes over from one that was killed


@pytest.fixture(scope="session")
def stage(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp(f"installation-{version}")
    quick = probes.path_with(probes.QUICK, directory / "quick")
    installation = Installation(directory, nodes=[NODE], env=quick)
    yield Stage(installation, Path(__file__).parent, AT_ONCE, on_a_cluster=True)
    installation.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An installation for those who kill it: it is whole again when they are done."""
    installation = Installation(tmp_path_factory.mktemp("installation"), lease_seconds=LEASE_SECONDS)
    yield installation
    installation.close()
