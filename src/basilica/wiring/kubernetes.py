"""The composition root for clusters: a store of custom resources, ranks as pods, keys as Secrets."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from basilica.controller.plane import Settings
from basilica.controller.retention import Retention, Work
from basilica.kube.client.access import ConfigurationError
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.egress import INTERNET, networks
from basilica.kube.manifests.run import Settings as RunSettings
from basilica.machine.clocks import SteadyClock, WallClock
from basilica.operator.attendance import Attendance
from basilica.operator.election import DURATION, Election
from basilica.operator.health import Health
from basilica.operator.metrics import OperatorMetrics
from basilica.operator.operator import Operator
from basilica.operator.release import release_finalizers
from basilica.operator.rights import NamespaceRights
from basilica.ports import Runtime
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica.server.serve import CannotServe, Listen, Parts, register_key, serve_stateless
from basilica.stores.kubernetes import KubernetesKeys, KubernetesStore, Refusals

log = logging.getLogger("basilica.operator")

NAMESPACE = "basilica-system"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The cluster, and the control plane's home namespace in it, which has its keys and its lease.

    The default namespace is that of this process, or `basilica-system`. `image` is ours, for the rendezvous and for
    runs that name none.
    """

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    image: str = "basilica"
    queue: str | None = None
    checkpoints: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    egress: tuple[str, ...] = (INTERNET,)
    run_settings: RunSettings | None = None  # replaces all options of runs above


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    host: str = "0.0.0.0"
    port: int = 8080
    lease_seconds: float = DURATION
    retention_seconds: float | None = None
    identity: str = field(default_factory=lambda: f"{socket.gethostname()}-{secrets.token_hex(3)}")


def connect(options: ClusterOptions) -> KubeApi:
    try:
        return KubeApi.connect(options.kubeconfig, options.context)
    except ConfigurationError as error:
        raise CannotServe(str(error)) from error


def home_of(options: ClusterOptions, api: KubeApi) -> str:
    in_a_pod = options.kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
    return options.namespace or (api.namespace if in_a_pod else NAMESPACE)


@contextlib.asynccontextmanager
async def open_cluster_keys(options: ClusterOptions) -> AsyncIterator[KubernetesKeys]:
    """Open the API keys of a cluster, for `basilica keys`."""
    async with connect(options) as api:
        keys = KubernetesKeys(api, home_of(options, api))
        await keys.open()
        try:
            yield keys
        finally:
            await keys.close()


def run_settings_of(options: ClusterOptions, home: str) -> RunSettings:
    return options.run_settings or RunSettings(
        image=options.image,
        control_namespace=home,
        queue=options.queue,
        checkpoints=options.checkpoints,
        image_pull_secrets=options.image_pull_secrets,
        egress=networks(options.egress),
    )


def _runtime(options: ClusterOptions, settings: RunSettings, *, drives: bool) -> KubernetesRuntime:
    """Return a runtime with a connection of its own, which it closes."""
    return KubernetesRuntime(connect(options), settings, drives=drives)


async def serve_kubernetes(
    listen: Listen, options: ClusterOptions, settings: Settings, api_key: str | None, announce: Callable[[str], None]
) -> None:
    """Serve the API alone: it records specs, and the operator carries them out. Any number of servers may run."""
    async with connect(options) as api:
        store = KubernetesStore(api, component="basilica-api")
        await store.open()
        try:
            async with open_cluster_keys(options) as keys:
                clock = WallClock()
                await register_key(keys, clock, api_key)
                home = home_of(options, api)
                async with Attendance(api, home) as operators:
                    runtime = _runtime(options, run_settings_of(options, home), drives=False)
                    parts = Parts(store, keys, runtime, clock, settings, lambda: operators.absence)
                    await serve_stateless(parts, listen, announce)
        finally:
            await store.close()


async def operate(options: ClusterOptions, wanted: OperatorOptions, announce: Callable[[int], None]) -> None:
    """Run an operator until SIGTERM or SIGINT; `announce` gets the port of its health endpoints."""
    async with connect(options) as api:
        home = home_of(options, api)
        settings = run_settings_of(options, home)
        store, clock = KubernetesStore(api, component="basilica-operator"), SteadyClock()
        election = Election(api, namespace=home, identity=wanted.identity, duration=wanted.lease_seconds)

        def hourly(runtime: Runtime) -> Sequence[Work]:
            return Retention(store, runtime, clock, wanted.retention_seconds).works

        operator = Operator(
            store,
            lambda: _runtime(options, settings, drives=True),
            clock,
            election,
            refusals=Refusals(store),
            hourly=hourly,
            beside=(lambda: NamespaceRights(api, home).keep(),),
        )
        metrics = OperatorMetrics(lambda: operator.controller, lambda: election.leading)
        health = Health(lambda: store.behind, metrics.text)
        await store.open()
        try:
            with _until_signalled() as stop:
                async with health.listening(wanted.host, wanted.port) as port:
                    announce(port)
                    await operator.run(stop)
        finally:
            await store.close()


async def release(options: ClusterOptions) -> list[str]:
    """Remove our finalizers from all objects, so that they can be deleted without an operator; return their names."""
    async with connect(options) as api:
        return await release_finalizers(api)


@contextlib.contextmanager
def _until_signalled() -> Iterator[asyncio.Event]:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for sig in signals:
        loop.add_signal_handler(sig, stop.set)
    try:
        yield stop
    finally:
        for sig in signals:
            loop.remove_signal_handler(sig)
