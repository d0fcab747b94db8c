"""Settings of all tests."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from xdist.remote import Producer

from tests.support import exploring, groups, second_try, times

exploring.load_profile()

# What is collected stays until the end: looking through it for garbage would be a third of the work of collecting.
gc.disable()

# A shell starts what runs in its background with interrupts ignored, and so would every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without bytecode each of the thousands of processes that tests start compiles what it imports, for up to a second of
# processor time, and each worker rewrites every assertion.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
    sys.dont_write_bytecode = False

# What `make test` installs and `make test-fast` does not wait for.
INSTALLED = {"version", "browser", "etcd", "etcds"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("basilica")
    group.addoption("--times", type=Path, metavar="FILE", help="write what each test took")
    group.addoption("--second-try", action="store_true", help="try what failed once more, alone")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # whoever gave it the tests hears of all of them
    if config.option.times is not None:
        config.pluginmanager.register(times.Stopwatch(config.option.times))
    if config.option.second_try:
        config.pluginmanager.register(second_try.SecondTry(config))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> groups.Groups | None:
    return groups.Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = times.read()
    for item in items:
        needs = INSTALLED.intersection(item.fixturenames) if isinstance(item, pytest.Function) else ()
        if needs or times.test_of(item.nodeid) in seconds:
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        groups.arrange(items, seconds)
