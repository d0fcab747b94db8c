"""`basilica console`: the server's page in the browser, logged in."""

import os
import sys
from typing import Annotated
from urllib.parse import quote

import typer

from basilica.cli.common import Json


def console(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Open the page of this run.", show_default="all runs")
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", "--no-browser", help="Print the link instead of opening a browser.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Open the console in the browser: state, metrics and failures of all runs.

    The link logs in once, within five minutes, and contains no key. Without a browser, it is printed.

    \b
    Examples:
      basilica console
      basilica console llama
      basilica console --print
    """
    from basilica.cli import terminal
    from basilica.cli.train.common import PATIENCE
    from basilica.client import embedded, flows
    from basilica.client.config import find_target
    from basilica.client.drivers import BlockingDriver, Endpoint
    from basilica.client.effects import Call
    from basilica.core.errors import BasilicaError, ServerError

    target = find_target(None, None)

    def locate() -> Endpoint:
        return embedded.locate() if target.url is None else Endpoint(target.url, target.key)

    driver = BlockingDriver(locate)
    try:
        with terminal.busy(lambda: "asking the server"):
            call = Call(method="POST", path="/console/login-links", body={})
            answer = driver.run(flows.ask(call, patience=PATIENCE))
            path, expires_at = answer.parsed(lambda body: (str(body["path"]), body["expiresAt"]))
            url = locate().url
    except ServerError as error:
        if error.status != 404:
            raise
        raise BasilicaError("this server has no console: it is older than this command") from error
    finally:
        driver.close()
    link = url + path + (f"#/run/{quote(name, safe='')}" if name else "")
    if as_json:
        terminal.write_json({"link": link, "expiresAt": expires_at})
    elif only_print:
        terminal.write_line(link)
    elif _has_browser() and _open(link):
        terminal.notify(f"opened {url} in the browser")
    else:
        terminal.notify("no browser was found here; open this link, which logs in once, within five minutes:")
        terminal.write_line(link)


def _has_browser() -> bool:
    """Return whether a graphical browser can open: without a screen, a text browser might take over this terminal."""
    if sys.platform != "linux" or os.environ.get("BROWSER"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def _open(link: str) -> bool:
    import webbrowser

    return webbrowser.open(link)
