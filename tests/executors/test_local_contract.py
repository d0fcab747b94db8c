"""The local executor keeps the contract."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from basilica.executors import LocalProcessExecutor, ServerlessExecutor
from basilica.testing.executor_contract import ExecutorContract


class TestLocalProcessExecutor(ExecutorContract):
    runs_callables = True
    passes_objects = True
    sets_rank_env = True

    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        return partial(LocalProcessExecutor, state_dir=directory / "state", grace_seconds=2)
