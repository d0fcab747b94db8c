"""How stories are told of a store, and what they begin with."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from basilica.core.events import Event
from basilica.core.phase import Phase
from basilica.core.spec import DeploymentSpec, Shell, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from basilica.ports import Deployment

STORY_SECONDS = 20.0

CREATED = Event("Created", "it was created")

Opened = TypeVar("Opened")
Contract = TypeVar("Contract", bound="Opens[Any]")


class Opens(Generic[Opened]):
    """Says how what is tried is opened."""

    def opened(self, directory: Path) -> AbstractAsyncContextManager[Opened]:
        """An empty one, closed at the end. `directory` is empty and private to the test."""
        raise NotImplementedError


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run one story to its end; one that hangs fails."""
    asyncio.run(asyncio.wait_for(coroutine, STORY_SECONDS))


def story(test: Callable[[Contract, Any], Awaitable[None]]) -> Callable[[Contract, Path], None]:
    """Make a test of a coroutine that takes an open store."""

    def told(self: Contract, tmp_path: Path) -> None:
        async def tell() -> None:
            async with self.opened(tmp_path) as opened:
                await test(self, opened)

        run(tell())

    told.__name__, told.__qualname__, told.__doc__ = test.__name__, test.__qualname__, inspect.getdoc(test)
    return told


def a_run(
    instance: str = "train-1",
    *,
    name: str = "train",
    user: str = "ann",
    target: int = 2,
    created_at: float = 1000.0,
    script: str = "train.sh",
) -> Deployment:
    """A new run, as the server hands it to `create`."""
    return Deployment(
        instance=instance,
        user=user,
        namespace=f"u-{user}",
        spec=DeploymentSpec(name=name, program=Shell(script), world=WorldSize(1, target, 8)),
        status=DeploymentStatus(created_at=created_at),
        version=0,
    )


def ended(status: DeploymentStatus, at: float, *, settled: bool = True) -> DeploymentStatus:
    return replace(status, phase=Phase.SUCCEEDED, terminal_at=at, settled=settled)


def cancelled(deployment: Deployment) -> DeploymentSpec:
    return deployment.spec.ended_by(Wanted.CANCEL)


async def let_others_run() -> None:
    """Long enough for every task that can run to come to its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)
