"""Shared parts of commands: common options, and the parser of durations."""

import logging
import re
from pathlib import Path
from typing import Annotated

import typer

from basilica.core import environment as env

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)?")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def _without_tilde(path: Path | None) -> Path | None:
    """Expand `~`: a shell does it in an argument, but not in an environment variable."""
    return None if path is None else path.expanduser()


StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        callback=_without_tilde,
        help="Directory of runs, logs and keys.",
        envvar=env.STATE_DIR,
        show_default="$XDG_STATE_HOME/basilica",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def seconds(text: str) -> float:
    """Parse a duration: `90`, `90s`, `15m`, `12h`, `7d`, `2w`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration; write 90s, 15m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def log_level_of(text: str) -> int:
    level = logging.getLevelNamesMapping().get(text.upper())
    if level is None:
        raise typer.BadParameter(f"{text!r}: use debug, info, warning or error", param_hint="--log-level")
    return level
