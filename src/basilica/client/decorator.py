"""`basilica.distributed`: a function that runs as a gang, or a command that does so at once."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from basilica.core import environment as env

if TYPE_CHECKING:
    from basilica.client.api import BasilicaClient
    from basilica.client.training import DistributedTraining

P = ParamSpec("P")
R = TypeVar("R")


class Distributed(Generic[P, R]):
    """A function with the options of its runs. Calling it starts one and returns its handle.

    >>> @basilica.distributed(world_size=basilica.WorldSize(1, 2, 4))      # doctest: +SKIP
    ... def train(epochs: int) -> float: ...
    >>> train(3).results()                                                 # doctest: +SKIP
    {0: 0.25, 1: 0.25}
    >>> train.local(1)                                                     # doctest: +SKIP
    0.5
    """

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._options = dict(options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> "DistributedTraining":
        return self.deploy(args=args, kwargs=kwargs)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here, as rank 0 of 1."""
        if inspect.iscoroutinefunction(self.__wrapped__):
            return _awaited_alone(self.__wrapped__(*args, **kwargs))  # type: ignore[return-value]
        with alone():
            return self.__wrapped__(*args, **kwargs)

    def deploy(
        self,
        client: "BasilicaClient | None" = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> "DistributedTraining":
        """Start a run with other options than the decorator's."""
        given = {"client": client, "name": name}
        options = self._options | overrides | {key: value for key, value in given.items() if value is not None}
        shipped = {"source": self.__wrapped__, "source_args": tuple(args), "source_kwargs": dict(kwargs or {})}
        return _deploy(options | shipped)

    def options(self, **overrides: Any) -> "Distributed[P, R]":
        """Return the same function with other options."""
        return Distributed(self.__wrapped__, self._options | overrides)

    def __repr__(self) -> str:
        return f"<distributed {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"


@overload
def distributed(function: Callable[P, R], /) -> Distributed[P, R]: ...


@overload
def distributed(*, command: Sequence[str] | str, **options: Any) -> "DistributedTraining": ...


@overload
def distributed(**options: Any) -> Callable[[Callable[P, R]], Distributed[P, R]]: ...


def distributed(function: Any = None, /, **options: Any) -> Any:
    """A decorator for a function that runs as a gang; with `command`, start one at once and return its handle.

    The options are those of `deploy_distributed`.

    >>> basilica.distributed(command=["python", "train.py"], world_size=basilica.WorldSize(1, 2, 4))  # doctest: +SKIP
    """
    if options.get("command") is not None:
        return _deploy(options)
    if function is not None:
        return Distributed(function, options)
    return lambda decorated: Distributed(decorated, options)


def _deploy(options: Mapping[str, Any]) -> "DistributedTraining":
    from basilica.client import api  # noqa: PLC0415  it imports the HTTP client

    rest = dict(options)
    client: BasilicaClient = rest.pop("client", None) or api.BasilicaClient()
    return client.deploy_distributed(rest.pop("name", None), **rest)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Set the environment of rank 0 of 1 while the context lasts."""
    before = dict(os.environ)
    mine = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", env.RANK: "0"}
    mine |= dict.fromkeys((env.WORLD_MIN, env.WORLD_TARGET, env.WORLD_MAX), "1")
    if "MASTER_PORT" not in before:
        mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


async def _awaited_alone(work: Any) -> Any:
    with alone():
        return await work


def _free_port() -> int:
    import socket  # noqa: PLC0415  so that `import basilica` stays quick

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port
