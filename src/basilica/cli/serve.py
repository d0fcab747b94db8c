"""`basilica serve`: run a control plane on this machine."""

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from basilica.cli.cluster import Context, ControlNamespace, Image, Kubeconfig, StoreKind
from basilica.cli.common import StateDir, log_level_of, seconds
from basilica.core import environment as env

try:
    import uvloop
except ImportError:  # only CPython has it
    uvloop = None  # type: ignore[assignment]

API_KEYS_OF_A_CLUSTER = "API keys: basilica keys create --store kubernetes --user NAME"


def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback only with API keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = 7411,
    store: Annotated[
        StoreKind, typer.Option(help="Store of runs: this machine, or a cluster with an operator.")
    ] = StoreKind.LOCAL,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: ControlNamespace = None,
    image: Image = "basilica",
    state_dir: StateDir = None,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
    api_key_file: Annotated[Path | None, typer.Option(help="File with an API key that clients may use.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=[env.API_KEY, env.API_TOKEN], hidden=True, show_envvar=False)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM) for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) of the certificate.")] = None,
    max_deployments: Annotated[int, typer.Option(help="Maximum number of live runs of a user.", min=1)] = 10_000,
    max_ranks: Annotated[int, typer.Option(help="Maximum number of ranks in live runs of a user.", min=1)] = 4096,
    retention: Annotated[
        str | None, typer.Option(help="Delete runs this long after their end: 12h, 30d.", show_default="keep them")
    ] = None,
    idle_exit: Annotated[
        str,
        typer.Option(
            help="Stop when no run is live and no request came for this long: 900, 15m.", show_default="never"
        ),
    ] = "0",
    run_as: Annotated[
        str | None,
        typer.Option(
            help="Run ranks as this user, without access to the rest of the state directory; needs root.",
            show_default="the server's own user",
        ),
    ] = None,
    detach: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a control plane on this machine: the REST API, and ranks as processes.

    Runs outlive the server: the next server on the same state directory adopts them. With --store kubernetes it serves
    the API alone, in any number of replicas beside the operator.

    \b
    Examples:
      basilica serve
      basilica serve --port 8000 --state-dir /srv/basilica --retention 30d
      basilica serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
      sudo basilica serve --state-dir /var/lib/basilica --run-as trainer
      basilica serve --store kubernetes --kubeconfig ~/.kube/config
    """
    if detach is not None:
        _detach(detach)
    from basilica.controller.plane import Settings
    from basilica.machine.places import default_state_dir
    from basilica.ports import Limits
    from basilica.server.serve import Listen
    from basilica.wiring.local import serve_embedded

    level = log_level_of(log_level)
    if store is StoreKind.KUBERNETES:
        from basilica.operator.logs import log_as_json

        log_as_json(level)
    else:
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    directory = state_dir or default_state_dir()
    listen = Listen(host=host, port=port, tls_cert=tls_cert, tls_key=tls_key)
    settings = Settings(
        limits=Limits(deployments=max_deployments, ranks=max_ranks),
        retention_seconds=None if retention is None else seconds(retention),
        idle_exit_seconds=seconds(idle_exit) or None,
    )
    key = _read_key(api_key_file) if api_key_file is not None else api_key

    def announce(url: str) -> None:
        typer.echo(f"Basilica listens on {url}")
        typer.echo(f"API key: {directory / 'api-key'}" if store is StoreKind.LOCAL else API_KEYS_OF_A_CLUSTER)
        if not listen.loopback and listen.tls_cert is None:
            typer.echo("Keys travel unencrypted: use --tls-cert and --tls-key, or a proxy that does.", err=True)
        if detach is not None:
            _write_line(detach, url)
            os.close(detach)

    run = uvloop.run if uvloop is not None else asyncio.run
    if store is StoreKind.LOCAL:
        run(serve_embedded(listen, directory, settings, key, announce, run_as=run_as))
        return
    from basilica.wiring.kubernetes import ClusterOptions, serve_kubernetes

    leave = None if idle_exit == "0" else idle_exit
    _only_local(run_as=run_as, retention=retention, idle_exit=leave, state_dir=state_dir)
    options = ClusterOptions(kubeconfig=kubeconfig, context=context, namespace=namespace, image=image)
    run(serve_kubernetes(listen, options, settings, key, announce))


def _only_local(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            hint = " (the operator has --retention)" if name == "retention" else ""
            raise typer.BadParameter(
                f"has no meaning with --store kubernetes{hint}", param_hint=f"--{name.replace('_', '-')}"
            )


def _detach(fd: int) -> None:
    """Detach from the starting process: it has no child to wait for, and reads our pid on `fd` now and our URL later.

    It is called before any thread or event loop is started. An end of file means that the server has failed.
    """
    os.set_inheritable(fd, False)
    if os.fork():
        os._exit(0)
    _write_line(fd, str(os.getpid()))


def _write_line(fd: int, line: str) -> None:
    with suppress(BrokenPipeError):  # the starting process has ended; the server goes on
        os.write(fd, line.encode() + b"\n")


def _read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--api-key-file") from error
