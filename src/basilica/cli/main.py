"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

import sys

import typer

from basilica import __version__
from basilica.cli import doctor, keys, local, prune, serve
from basilica.core.errors import BasilicaError

app = typer.Typer(
    name="basilica",
    help="Elastic distributed training that tells you what is going on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.command("prune")(prune.prune)
app.add_typer(keys.app, name="keys")
app.add_typer(local.app, name="local")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"basilica {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """Errors that we know are one line on stderr and exit code 1; bad usage is 2, as everywhere."""
    try:
        app()
    except BasilicaError as error:
        typer.echo(f"basilica: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
