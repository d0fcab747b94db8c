"""The parser of `basilica train up`: from arguments to options of the SDK. Pure, apart from environment and files."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from basilica.core.errors import WorldSizeOutOfBounds
from basilica.core.world import WorldSize

BENCH_VALUES = ("on-start", "off")
REST = "basilica.rest"  # in a context's `meta`: the arguments after `--`, or None without it
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class WithRest(TyperCommand):
    """A command that takes the arguments after `--` unchanged, and distinguishes none of them from no `--`."""

    rest_usage = "-- COMMAND..."

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), self.rest_usage]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        before, after = split_rest(args)
        ctx.meta[REST] = after
        return super().parse_args(ctx, before)


class UpCommand(WithRest):
    """The same, with `--bench` with and without a value, and `--no-bench`."""

    rest_usage = "[-- COMMAND|ARGS...]"

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        before, after = split_rest(args)
        rest = [] if after is None else ["--", *after]
        return super().parse_args(ctx, [*plain_bench(before), *rest])


def split_rest(args: Sequence[str]) -> tuple[list[str], list[str] | None]:
    if "--" not in args:
        return list(args), None
    at = list(args).index("--")
    return list(args[:at]), list(args[at + 1 :])


def plain_bench(args: Sequence[str]) -> list[str]:
    """Give `--bench` alone and `--no-bench` their values."""
    plain: list[str] = []
    for n, part in enumerate(args):
        if part == "--no-bench":
            plain.append("--bench=off")
        elif part == "--bench":
            followed = n + 1 < len(args) and args[n + 1] in BENCH_VALUES
            plain.append("--bench" if followed else "--bench=on-start")
        else:
            plain.append(part)
    return plain


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a run, a command or a script, and the run's name."""

    name: str | None
    command: list[str] | str | None
    script: Path | None
    args: list[str]


def program(words: Sequence[str], rest: Sequence[str] | None, shell: str | None) -> Program:
    """Parse `[NAME] -- COMMAND…`, `[NAME] SCRIPT.py [-- ARGS…]` or `[NAME] --command TEXT`."""
    given = list(words)
    script = Path(given.pop()) if given and given[-1].endswith(".py") else None
    if len(given) > 1:
        raise typer.BadParameter(f"put '--' before the command: -- {' '.join(given[1:])}", param_hint="COMMAND")
    name = given[0] if given else None
    if sum((script is not None, shell is not None, script is None and bool(rest))) != 1:
        problem = "give one thing to run: '-- COMMAND…' or SCRIPT.py or --command TEXT"
        raise typer.BadParameter(problem, param_hint="COMMAND")
    if script is not None:
        if not script.is_file():
            raise typer.BadParameter(f"there is no file {str(script)!r}", param_hint="SCRIPT")
        return Program(name, None, script, list(rest or ()))
    return Program(name, list(rest or ()) if shell is None else shell, None, [])


def world_size(text: str) -> WorldSize:
    """Parse `4`, or `MIN:TARGET:MAX`."""
    parts = text.split(":")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is no world size; write 4, or MIN:TARGET:MAX such as 2:4:8")
    numbers = [int(part) for part in parts]
    try:
        return WorldSize(*(numbers if len(numbers) == 3 else numbers * 3))
    except WorldSizeOutOfBounds as error:
        raise typer.BadParameter(str(error)) from None


def variables(given: Sequence[str], option: str, *, here: Mapping[str, str] | None = None) -> dict[str, str]:
    """Parse `K=V`, or `K` for its value in our environment. An invalid value is not shown: it may be a secret."""
    found: dict[str, str] = {}
    environment = os.environ if here is None else here
    for item in given:
        name, equals, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise typer.BadParameter(f"{name!r} is no name of a variable; write NAME=VALUE", param_hint=option)
        if not equals and name not in environment:
            raise typer.BadParameter(f"{name} is not set here; write {name}=VALUE", param_hint=option)
        found[name] = value if equals else environment[name]
    return found


def env_file(path: Path) -> dict[str, str]:
    """Parse `NAME=VALUE` lines; empty lines, lines that begin with `#`, and quotes around a value do not count."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--env-file") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise typer.BadParameter(f"line {number} of {path} is not NAME=VALUE", param_hint="--env-file")
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[name] = value
    return found


def names(given: Sequence[str]) -> tuple[str, ...]:
    """Split `a,b`; repeated options mean the same."""
    return tuple(name for item in given for name in item.split(",") if name)
