"""`basilica keys`: the API keys of a server. A running server notices changes at once."""

import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from basilica.cli.cluster import Context, ControlNamespace, Kubeconfig, StoreKind
from basilica.cli.common import Json, StateDir

if TYPE_CHECKING:
    from basilica.ports import Keys

KeyStore = Annotated[
    StoreKind, typer.Option("--store", help="Store of keys: the server of this machine, or a cluster.")
]

app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)


def _opened(
    store: StoreKind, state_dir: Path | None, kubeconfig: str | None, context: str | None, namespace: str | None
) -> "AbstractAsyncContextManager[Keys]":
    if store is StoreKind.KUBERNETES:
        from basilica.wiring.kubernetes import ClusterOptions, open_cluster_keys

        return open_cluster_keys(ClusterOptions(kubeconfig=kubeconfig, context=context, namespace=namespace))
    from basilica.machine.places import default_state_dir
    from basilica.wiring.local import open_keys

    return open_keys(state_dir or default_state_dir())


@app.command("create")
def create(
    *,
    user: Annotated[str, typer.Option(help="Owner of the key; each user has separate runs.")] = "local",
    note: Annotated[str, typer.Option(help="Purpose of the key.")] = "",
    state_dir: StateDir = None,
    store: KeyStore = StoreKind.LOCAL,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: ControlNamespace = None,
    as_json: Json = False,
) -> None:
    """Create an API key and print it; it cannot be shown again.

    \b
    Example:
      export BASILICA_API_KEY=$(basilica keys create --user alice)
      basilica keys create --store kubernetes --user alice
    """
    from basilica.server.auth import key_record, new_key

    key = new_key()
    record = key_record(key, user, time.time(), note)

    async def add() -> None:
        async with _opened(store, state_dir, kubeconfig, context, namespace) as keys:
            await keys.add_key(record)

    asyncio.run(add())
    typer.echo(json.dumps({"id": record.id, "user": user, "key": key}) if as_json else key)


@app.command("list")
def list_keys(
    *,
    state_dir: StateDir = None,
    store: KeyStore = StoreKind.LOCAL,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: ControlNamespace = None,
    as_json: Json = False,
) -> None:
    """List API keys by id, user and note, without the secrets.

    \b
    Example:
      basilica keys list --json
    """
    from basilica.wire.base import rfc3339

    async def read() -> list[dict[str, str]]:
        async with _opened(store, state_dir, kubeconfig, context, namespace) as keys:
            return [
                {"id": k.id, "user": k.user, "createdAt": rfc3339(k.created_at), "note": k.note}
                for k in await keys.keys()
            ]

    rows = asyncio.run(read())
    if as_json:
        typer.echo(json.dumps(rows))
        return
    typer.echo(f"{'ID':12}  {'USER':20}  {'CREATED':24}  NOTE")
    for row in rows:
        typer.echo(f"{row['id']:12}  {row['user']:20}  {row['createdAt']:24}  {row['note']}")


@app.command("revoke")
def revoke(
    id: Annotated[str, typer.Argument(help="Id of the key, from `basilica keys list`.")],
    *,
    state_dir: StateDir = None,
    store: KeyStore = StoreKind.LOCAL,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: ControlNamespace = None,
    as_json: Json = False,
) -> None:
    """Revoke an API key; it stops working at once.

    \b
    Example:
      basilica keys revoke 3f9c0a1b2d4e
    """

    async def remove() -> bool:
        async with _opened(store, state_dir, kubeconfig, context, namespace) as keys:
            return await keys.revoke_key(id)

    if not asyncio.run(remove()):
        typer.echo(f"basilica: no key has the id {id!r}; see 'basilica keys list'", err=True)
        raise typer.Exit(1)
    typer.echo(json.dumps({"id": id, "revoked": True}) if as_json else f"revoked {id}")
