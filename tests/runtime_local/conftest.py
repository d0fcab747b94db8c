"""Tests here are coroutines, and each ends with the question whether a process was left behind."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime_local.machine import Machine


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "state")
    yield machine
    assert machine.nothing_left(), "processes were left behind"
