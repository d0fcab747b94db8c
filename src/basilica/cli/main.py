"""The command line. Each command imports its modules when it runs, so that `--help` is quick."""

import os
import sys

import typer

from basilica.cli import (
    account,
    console,
    diloco,
    doctor,
    keys,
    local,
    manifests,
    network,
    operator,
    prune,
    run,
    serve,
    train,
)
from basilica.core.errors import BasilicaError, NetworkError
from basilica.version import __version__

app = typer.Typer(
    name="basilica",
    help="Run elastic distributed training, on this machine or on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(train.app, name="train")
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("operator")(operator.operator)
app.command("manifests")(manifests.manifests)
app.command("console")(console.console)
app.command("doctor")(doctor.doctor)
app.command("prune")(prune.prune)
app.command("rendezvous")(network.rendezvous)
app.command("mesh-wait", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(network.mesh_wait)
app.add_typer(diloco.app, name="diloco")
app.add_typer(keys.app, name="keys")
app.add_typer(local.app, name="local")
app.command("login")(account.login)
app.command("logout")(account.logout)
app.command("config")(account.config)
app.command("completion")(account.completion)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"basilica {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    pass


def main() -> None:
    """Run the command. A known error is one line on stderr and exit code 1; bad usage is exit code 2, as everywhere."""
    if account.COMPLETION_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app()
    except BasilicaError as error:
        typer.echo(f"basilica: {_message_of(error)}", err=True)
        sys.exit(1)


def _message_of(error: BasilicaError) -> str:
    """Return the error's message without control characters: foreign text in it must not act on the terminal."""
    from basilica.cli.show import clean

    text = account.unreachable(str(error)) if isinstance(error, NetworkError) else str(error)
    return "\n".join(clean(line) for line in text.splitlines())


if __name__ == "__main__":
    main()
