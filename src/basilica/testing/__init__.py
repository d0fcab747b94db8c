"""Fakes and contract suites, shipped so that others can test theirs. Names are loaded when they are first used."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basilica.testing.executor_contract import ExecutorContract
    from basilica.testing.runtime_contract import RuntimeContract
    from basilica.testing.store_contract import KeysContract, StoreContract

_HOME_OF = {
    "ExecutorContract": "executor_contract",
    "KeysContract": "store_contract",
    "RuntimeContract": "runtime_contract",
    "StoreContract": "store_contract",
}

__all__ = ["ExecutorContract", "KeysContract", "RuntimeContract", "StoreContract"]

if "pytest" in sys.modules:  # a suite that fails shows the values, as the tests of those who use it do
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{home}" for home in set(_HOME_OF.values())))


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'basilica.testing' has no attribute {name!r}")
    return getattr(import_module(f"basilica.testing.{_HOME_OF[name]}"), name)
