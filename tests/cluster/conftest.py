"""`make test-cluster IMAGE=…`: the stories of an installation on the cluster that kubectl speaks to."""

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.cluster.installed import Installed, kubeconfig_is_there


@pytest.fixture(scope="session")
def here() -> Iterator[Installed]:
    """`BASILICA_TEST_IMAGE`: ours, where nodes find it; `BASILICA_TEST_PLAIN_IMAGE`: any with Python 3.11 or later."""
    image = os.environ.get("BASILICA_TEST_IMAGE")
    if not image or not kubeconfig_is_there():
        pytest.fail("name our image by BASILICA_TEST_IMAGE, and the cluster by KUBECONFIG: see `make test-cluster`")
    plain = os.environ.get("BASILICA_TEST_PLAIN_IMAGE", "python:3.12-slim")
    installed = Installed(image, plain, f"test-{uuid.uuid4().hex[:6]}")
    try:
        installed.open()
        yield installed
    finally:
        installed.close()
