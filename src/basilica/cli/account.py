"""`basilica login`, `logout`, `config` and `completion`: the choice of the server, and the shell."""

import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO
from urllib.parse import urlsplit, urlunsplit

import typer

from basilica.cli.common import Json

CHECK_SECONDS = 15.0
COMPLETION_VARIABLE = "_BASILICA_COMPLETE"


def login(
    url: Annotated[str, typer.Argument(help="URL of the server: https://…", show_default=False)],
    key_file: Annotated[
        Path | None, typer.Option(help="File with the API key.", show_default="BASILICA_API_KEY, else a prompt")
    ] = None,
    as_json: Json = False,
) -> None:
    """Save the server that commands and scripts use, with its API key.

    The key is checked first, and saved in a file that only you can read.

    \b
    Examples:
      basilica login https://basilica.example.org
      basilica login http://127.0.0.1:7411 --key-file ~/.local/state/basilica/api-key
    """
    from basilica.cli import terminal
    from basilica.client.config import URL_VARIABLE, save_login

    key = _read_key(key_file)
    with terminal.busy(lambda: f"asking {without_password(url)}"):
        _try(url, key)
    path = save_login(url, key)
    if as_json:
        terminal.write_json({"url": without_password(url), "file": str(path)})
    else:
        terminal.write_line(f"logged in to {without_password(url)}; saved in {path}")
    if os.environ.get(URL_VARIABLE):
        terminal.notify(f"{URL_VARIABLE} is set, and wins over the login")


def logout(as_json: Json = False) -> None:
    """Delete the saved server and its API key.

    \b
    Example:
      basilica logout
    """
    from basilica.cli import terminal
    from basilica.client.config import forget_login, login_file

    there = forget_login()
    if as_json:
        terminal.write_json({"loggedOut": there})
    else:
        terminal.write_line(f"removed {login_file()}" if there else "there is no saved login")


def config(as_json: Json = False) -> None:
    """Show the server in use and where it is configured, the directories, and versions. Never shows a key.

    \b
    Example:
      basilica config --json
    """
    from basilica.cli import terminal
    from basilica.client.config import KEY_VARIABLES, URL_VARIABLE, find_target, login_file
    from basilica.machine.places import default_state_dir
    from basilica.version import __version__

    target = find_target(None, None)
    key_from = next((name for name in KEY_VARIABLES if os.environ.get(name)), None)
    if target.url is None:
        why, key_from = f"no {URL_VARIABLE} and no saved login: a local server, started when needed", None
    elif target.where_from == URL_VARIABLE:
        why = f"{URL_VARIABLE} is set"
    else:
        why = f"saved login in {target.where_from}"
        key_from = key_from or (target.where_from if target.key else None)
    running = _running() if target.url is None else None
    url = target.url or (None if running is None else running.url)
    facts: dict[str, Any] = {
        "server": None if url is None else without_password(url),
        "why": why,
        "key": key_from,
        "loginFile": str(login_file()),
        "stateDir": str(default_state_dir()),
        "version": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "serverVersion": None if url is None else _server_version(target.url, running),
    }
    if as_json:
        terminal.write_json(facts)
        return
    shown = {
        "server": facts["server"] or "none runs yet",
        "because": why,
        "key from": key_from or ("the server's own file" if target.url is None else "nowhere"),
        "login file": facts["loginFile"],
        "state directory": facts["stateDir"],
        "version": __version__,
        "python": facts["python"],
        "server version": facts["serverVersion"] or "it does not answer",
    }
    if url is None:
        del shown["server version"]
    for name, value in shown.items():
        terminal.write_line(f"{name:16} {value}")


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Name of the shell.", show_default=False)],
) -> None:
    """Print the shell script that completes commands, options and names of runs.

    \b
    Examples:
      basilica completion bash > ~/.local/share/bash-completion/completions/basilica
      basilica completion fish > ~/.config/fish/completions/basilica.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name="basilica", complete_var=COMPLETION_VARIABLE, shell=shell))


def unreachable(problem: str) -> str:
    """Return the message for a server that did not answer: its address, and how to find out why it was chosen."""
    from basilica.client.config import find_target

    url = find_target(None, None).url
    who = "the local server" if url is None else without_password(url)
    return f"{who} does not answer ({problem}); 'basilica config' says why it was asked"


def without_password(url: str) -> str:
    """Return a URL without its password, for display."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _first_line() -> str:
    """Return the first line of stdin; empty if there is none."""
    stdin: TextIO | None = sys.stdin
    return "" if stdin is None else stdin.readline()


def _read_key(path: Path | None) -> str:
    from basilica.cli.terminal import stdin_is_terminal
    from basilica.client.config import KEY_VARIABLES

    if path is not None:
        try:
            key = path.expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--key-file") from error
    else:
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
        if not key:
            key = typer.prompt("API key", hide_input=True, err=True) if stdin_is_terminal() else _first_line()
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise typer.BadParameter("that is no API key", param_hint="--key-file")
    return key


def _try(url: str, key: str) -> None:
    """Send one request with the key; raise an error if the server refuses it."""
    from basilica.client import flows
    from basilica.client.config import find_target
    from basilica.client.drivers import BlockingDriver, Endpoint
    from basilica.client.effects import Call
    from basilica.core.errors import BasilicaError, NetworkError, ServerError

    checked = find_target(url, key).url
    driver = BlockingDriver(lambda: Endpoint(checked or url, key))
    try:
        answer = driver.run(flows.once(Call(method="GET", path="/deployments", timeout=CHECK_SECONDS)))
        answer.parsed(lambda body: list(body["deployments"]))
    except NetworkError as error:
        raise BasilicaError(f"{without_password(url)} does not answer: {error}") from error
    except ServerError as error:
        raise BasilicaError(f"{without_password(url)} is no Basilica server: {error}") from error
    finally:
        driver.close()


def _running() -> Any:
    from basilica.client import embedded

    return embedded.find()


def _server_version(url: str | None, running: Any) -> str | None:
    from basilica.client import flows
    from basilica.client.drivers import BlockingDriver, Endpoint
    from basilica.client.effects import Call
    from basilica.core.errors import BasilicaError

    driver = BlockingDriver(lambda: running.endpoint if url is None else Endpoint(url))
    try:
        answer = driver.run(flows.once(Call(method="GET", path="/health", timeout=CHECK_SECONDS)))
        return answer.parsed(lambda body: str(body["version"]))
    except BasilicaError:
        return None
    finally:
        driver.close()
