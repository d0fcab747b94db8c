"""`basilica manifests`: the objects of an installation in a cluster, for `kubectl apply -f -`."""

from typing import Annotated

import typer


def manifests(
    *,
    namespace: Annotated[str, typer.Option(help="Namespace of the control plane.")] = "basilica-system",
    image: Annotated[
        str, typer.Option(help="Container image of Basilica; deploy/ has its Containerfile.")
    ] = "basilica",
    with_api: Annotated[
        bool, typer.Option("--with-api", help="Include the REST API, for the SDK, the command line and the console.")
    ] = False,
) -> None:
    """Print the Kubernetes manifests of an installation: custom resource, roles, operator.

    \b
    Examples:
      basilica manifests --image example.com/basilica:1 | kubectl apply -f -
      basilica manifests --with-api --image example.com/basilica:1 | kubectl apply -f -
    """
    from basilica.core.names import check_name
    from basilica.kube.manifests.control_plane import manifests as render
    from basilica.kube.manifests.yaml import to_yaml

    check_name(namespace, "namespace")
    typer.echo(to_yaml(render(namespace=namespace, image=image, with_api=with_api)), nl=False)
