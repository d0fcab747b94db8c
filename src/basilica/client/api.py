"""The client: it creates runs and finds them again."""

import os
import secrets as entropy
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from basilica.client import embedded, flows
from basilica.client.config import Target, find_target
from basilica.client.drivers import AsyncDriver, BlockingDriver, Endpoint
from basilica.client.effects import Call, Flow
from basilica.client.flows import Remembered
from basilica.client.names import readable_name
from basilica.client.options import Deploy, DeployOptions, parse_options
from basilica.client.request import Program, to_wire
from basilica.client.training import DistributedTraining
from basilica.client.views import RunView
from basilica.core import waits
from basilica.core.errors import BasilicaError, DistributedError, ValidationError
from basilica.shipping.pack import pack
from basilica.shipping.source import Shipped, ship, with_packages

# Variables that a rank of an embedded server inherits from its caller, so that it finds the same programs and packages.
CALLER_ENVIRONMENT = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH")
Runs = list[RunView]
Names = list[str]


class BasilicaClient:
    """A client of one server: `base_url` and `api_key`, else `BASILICA_API_URL` and `BASILICA_API_TOKEN`, else the
    saved login, else an embedded server, which is started in the background when it is first needed.

    >>> client = basilica.BasilicaClient()                                               # doctest: +SKIP
    >>> training = client.deploy_distributed("hello", command=["python", "train.py"],
    ...                                      world_size=basilica.WorldSize(1, 2, 4))     # doctest: +SKIP
    >>> training.join()                                                                  # doctest: +SKIP
    """

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        self._target: Target = find_target(base_url, api_key)
        self._blocking = BlockingDriver(self._locate)
        self._async = AsyncDriver(self._locate)

    @property
    def is_embedded(self) -> bool:
        return self._target.url is None

    @property
    def base_url(self) -> str:
        return self._locate().url

    def _locate(self) -> Endpoint:
        return embedded.locate() if self._target.url is None else Endpoint(self._target.url, self._target.key)

    def _copy(self) -> "BasilicaClient":
        """Return a client of the same server with connections of its own, for another thread."""
        return BasilicaClient(self._target.url, self._target.key)

    # ---- runs --------------------------------------------------------------------------------------------------------

    def deploy_distributed(self, name: str | None = None, **options: Unpack[DeployOptions]) -> DistributedTraining:
        """Start a run; return its handle as soon as `min` ranks are up or the run has already ended.

        The options are those of `DeployOptions`. If the wait fails, the run is kept and the exception's `training` is
        its handle; with `cleanup_on_failure=True` it is deleted.

        >>> client.deploy_distributed(source=train, world_size=basilica.WorldSize(2, 2, 4))  # doctest: +SKIP
        """
        return self._blocking.run(self._deploy(parse_options(name, options)))

    async def deploy_distributed_async(
        self, name: str | None = None, **options: Unpack[DeployOptions]
    ) -> DistributedTraining:
        return await self._async.run(self._deploy(parse_options(name, options)))

    def training(self, name: str) -> DistributedTraining:
        """Return the handle of a run, from any process; `DeploymentNotFound` if no run has that name."""
        return DistributedTraining(self, name).refresh()

    async def training_async(self, name: str) -> DistributedTraining:
        return await DistributedTraining(self, name).refresh_async()

    def list(self) -> Runs:
        """Return all runs, newest first, in one request."""
        return self._blocking.run(flows.list_runs())

    async def list_async(self) -> Runs:
        return await self._async.run(flows.list_runs())

    def prune(self, older_than: float = 0.0) -> Names:
        """Delete the runs that ended more than `older_than` seconds ago; return their names."""
        return self._blocking.run(flows.prune(older_than))

    async def prune_async(self, older_than: float = 0.0) -> Names:
        return await self._async.run(flows.prune(older_than))

    def close(self) -> None:
        self._blocking.close()

    async def close_async(self) -> None:
        await self._async.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and the key: a copy in another process has connections of its own."""
        return BasilicaClient, (self._target.url, self._target.key)

    def __enter__(self) -> "BasilicaClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "BasilicaClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    # ---- deploying ---------------------------------------------------------------------------------------------------

    def _deploy(self, options: Deploy) -> Flow[DistributedTraining]:
        name, program = options.name or readable_name(), self._program(options)
        request = to_wire(name, options, program)  # raises for invalid options before anything is sent
        if options.workdir is not None and not self.is_embedded:
            digest = yield from _upload(pack(Path(options.workdir), options.on_upload))
            request = to_wire(name, options, replace(program, archive=digest))
        run = yield from flows.create(request, entropy.token_hex(16))
        training = DistributedTraining(self, run.name, delete_on_exit=options.delete_on_exit, _run=run)
        if not options.wait:
            return training
        try:
            yield from _up_or_over(run, options.timeout)
            if options.wait_for_bench != "never":
                yield from _wait_for_bench(run, options)
        except BasilicaError as error:
            error.training = training
            if options.cleanup_on_failure:
                yield from flows.delete(run, 30.0)
            raise
        return training

    def _program(self, options: Deploy) -> Program:
        """Return the program of the ranks. Those of an embedded server run in the caller's directory, with its programs
        and packages."""
        env, workdir = dict(options.run.get("env", {})), None
        resize = options.run.get("resize")
        if self.is_embedded:
            env = {name: os.environ[name] for name in CALLER_ENVIRONMENT if name in os.environ} | env
            workdir = str(Path(options.workdir or ".").absolute())
        if options.command is not None and not options.pip_packages:
            return Program(command=options.command, resize=resize or "join", env=env, workdir=workdir)
        shipped = self._shipped(options)
        return Program(command=shipped.argv, resize=resize or shipped.resize, env=env | shipped.env, workdir=workdir)

    def _shipped(self, options: Deploy) -> Shipped:
        python = sys.executable if self.is_embedded else "python3"
        if isinstance(options.command, str):
            raise ValidationError(
                "pip_packages", options.pip_packages, "need a `command` that is a list, or a `source`"
            )
        if options.command is not None:
            return with_packages(options.command, options.pip_packages, python=python, resize="join")
        return ship(
            options.source,
            args=options.source_args,
            kwargs=options.source_kwargs,
            python=python,
            launcher=options.launcher,
            rendezvous_backend=options.run.get("rendezvous_backend", "etcd-v2"),
            pip_packages=options.pip_packages,
            remote=not self.is_embedded,
            workdir=None if options.workdir is None else Path(options.workdir),
            by=options.ship,
        )


def _up_or_over(run: Remembered, timeout: float) -> Flow[None]:
    """Wait until `min` ranks are up or the run is over. An early end is no failure to deploy: the handle has it."""

    def up(seen: waits.Snapshot, limit: float) -> bool:
        return seen.lost or waits.min_world(seen, limit)

    yield from flows.wait(run, up, timeout)


def _wait_for_bench(run: Remembered, options: Deploy) -> Flow[None]:
    try:
        bench = yield from flows.wait_bench(run, options.bench_timeout)
    except TimeoutError:
        if options.wait_for_bench == "required":
            raise DistributedError(f"the bench has not ended within {options.bench_timeout:g} s") from None
        warnings.warn(f"the bench has not ended within {options.bench_timeout:g} s", stacklevel=2)
        return
    if bench is None or bench.phase == "Succeeded":
        return
    problem = f"the bench ended as {bench.phase}: {bench.message}"
    if options.wait_for_bench == "required":
        raise DistributedError(problem)
    warnings.warn(problem, stacklevel=2)


def _upload(packed: bytes) -> Flow[str]:
    call = Call(method="PUT", path="/archives", content=packed, timeout=600)
    answer = yield from flows.ask(call, patience=600)
    return answer.parsed(lambda body: str(body["archive"]))
