"""`basilica mesh-wait` and `basilica rendezvous`: the network between ranks, by hand."""

from pathlib import Path
from typing import Annotated

import typer


def mesh_wait(context: typer.Context) -> None:
    """Wait until this host's network is released, as an entrypoint does before it starts a rank. Always exits 0.

    --timeout SECONDS is how long to wait at most (60).

    \b
    Example:
      basilica mesh-wait --timeout 60 && exec torchrun train.py
    """
    from basilica import mesh

    mesh.main(context.args)


def rendezvous(
    data_dir: Annotated[Path, typer.Option(help="Where keys are kept: they survive a kill of the service.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any.")] = 2379,
) -> None:
    """Serve one rendezvous (the keys API of etcd v2) in the foreground, until Ctrl-C.

    Runs do not need it: each has a rendezvous of its own. It is for gangs that are started by other means.

    \b
    Example:
      basilica rendezvous --data-dir ./rendezvous --port 2379 &
      torchrun --rdzv-backend=basilica --rdzv-endpoint=127.0.0.1:2379 --rdzv-id=r1 --nnodes=2 train.py
    """
    from basilica.rendezvous import __main__ as service

    raise typer.Exit(service.main(["--data-dir", str(data_dir), "--host", host, "--port", str(port)]))
