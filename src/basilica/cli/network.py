"""`basilica mesh-wait` and `basilica rendezvous`: the network between ranks, by hand."""

from pathlib import Path
from typing import Annotated

import typer


def mesh_wait(context: typer.Context) -> None:
    """Wait until the network of this host is released, before the start of a rank. Always exits 0.

    --timeout SECONDS is the longest wait (default: 60).

    \b
    Example:
      basilica mesh-wait --timeout 60 && exec torchrun train.py
    """
    from basilica import mesh

    mesh.main(context.args)


def rendezvous(
    data_dir: Annotated[Path, typer.Option(help="Directory of the keys, which survive a crash of the service.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 2379,
) -> None:
    """Serve one rendezvous (the keys API of etcd v2) in the foreground, until Ctrl-C.

    Runs have a rendezvous of their own. This one is for torchrun jobs that are started by other means.

    \b
    Example:
      basilica rendezvous --data-dir ./rendezvous --port 2379 &
      torchrun --rdzv-backend=basilica --rdzv-endpoint=127.0.0.1:2379 --rdzv-id=r1 --nnodes=2 train.py
    """
    from basilica.rendezvous import __main__ as service

    raise typer.Exit(service.main(["--data-dir", str(data_dir), "--host", host, "--port", str(port)]))
