"""The options by which commands find a cluster."""

from enum import StrEnum
from typing import Annotated

import typer

from basilica.core import environment as env


class StoreKind(StrEnum):
    LOCAL = "local"
    KUBERNETES = "kubernetes"


Kubeconfig = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig",
        help="Kubeconfig file of the cluster.",
        show_default="the pod's own cluster, else kubectl's",
        envvar=env.KUBECONFIG,
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default="the current one")
]
ControlNamespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        help="Namespace of the control plane, with its keys and its lease.",
        show_default="the pod's own, else basilica-system",
        envvar=env.NAMESPACE,
    ),
]
Image = Annotated[
    str,
    typer.Option(
        help="Container image of Basilica, for the rendezvous and for runs without an image.", envvar=env.IMAGE
    ),
]
