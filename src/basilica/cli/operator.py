"""`basilica operator`: turn every run of a Kubernetes cluster."""

import asyncio
from typing import Annotated

import typer

from basilica.cli.cluster import Context, ControlNamespace, Image, Kubeconfig
from basilica.cli.common import log_level_of, seconds


def operator(
    *,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: ControlNamespace = None,
    image: Image = "basilica",
    host: Annotated[str, typer.Option(help="Address of the endpoints /healthz, /readyz and /metrics.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port of these endpoints; 0 for a free one.", min=0, max=65535)] = 8080,
    lease_seconds: Annotated[
        float, typer.Option(help="Duration of the leader's lease, after which another operator leads.", min=1, max=3600)
    ] = 15.0,
    retention: Annotated[
        str | None, typer.Option(help="Delete runs this long after their end: 12h, 30d.", show_default="keep them")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue queue of all runs.", show_default="none")] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Persistent volume claim in every namespace, mounted at /checkpoints; each run has a directory in it.",
            show_default="none",
        ),
    ] = None,
    image_pull_secret: Annotated[
        list[str] | None, typer.Option(help="Secret with the registry credentials of pods; repeatable.")
    ] = None,
    egress: Annotated[
        list[str] | None,
        typer.Option(
            help="Networks that ranks may reach, where network policies are enforced: internet, none, or a"
            " network such as 10.20.0.0/16; repeatable.",
            show_default="internet, without private networks",
        ),
    ] = None,
    release: Annotated[
        bool,
        typer.Option(
            "--release", help="Remove the finalizers of all runs and pods, and exit. Stop the operator first."
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
) -> None:
    """Run the controller of all runs of a Kubernetes cluster.

    Of several operators, one leads; ranks continue without any.

    \b
    Examples:
      basilica manifests | kubectl apply -f -
      basilica operator --kubeconfig ~/.kube/config
      basilica operator --release
    """
    from basilica.kube.manifests.egress import INTERNET
    from basilica.operator.logs import log_as_json
    from basilica.wiring.kubernetes import ClusterOptions, OperatorOptions, operate
    from basilica.wiring.kubernetes import release as release_all

    level = log_level_of(log_level)
    options = ClusterOptions(
        kubeconfig=kubeconfig,
        context=context,
        namespace=namespace,
        image=image,
        queue=queue,
        checkpoints=checkpoints,
        image_pull_secrets=tuple(image_pull_secret or ()),
        egress=tuple(egress or (INTERNET,)),
    )
    if release:
        for name in asyncio.run(release_all(options)):
            typer.echo(f"released {name}")
        return
    log_as_json(level)
    wanted = OperatorOptions(
        host=host,
        port=port,
        lease_seconds=lease_seconds,
        retention_seconds=None if retention is None else seconds(retention),
    )
    asyncio.run(operate(options, wanted, lambda at: typer.echo(f"Basilica's operator answers on {host}:{at}")))
