"""Settings of all tests."""

import signal
from pathlib import Path

import pytest

from tests.support import exploring

exploring.load_profile()

# A shell starts what runs in its background with interrupts ignored, and so would every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whole processes, terminals, servers and disks: all of it in `make test`, none of it in `make test-fast`.
SLOW_DIRECTORIES = (
    "bench",
    "cli",
    "console",
    "diloco",
    "damage",
    "e2e",
    "entrypoint",
    "executors",
    "kube",
    "kube_runtime",
    "mesh",
    "operator",
    "rendezvous",
    "runtime_local",
    "stores",
)
SLOW_MODULES = (
    "test_runtime_local.py",
    "test_store_kubernetes.py",
    "test_runtime_kubernetes.py",
    "test_embedded.py",
    "test_archive.py",
    "test_source.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path)
        if path.name in SLOW_MODULES or any(name in path.parts for name in SLOW_DIRECTORIES):
            item.add_marker(pytest.mark.slow)
