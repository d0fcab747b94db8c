"""The create request: from the keywords of the SDK to the wire. Pure: the caller has read environment and files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from basilica.client.options import Deploy
from basilica.core.errors import ValidationError
from basilica.core.spec import DeploymentSpec
from basilica.wire.spec import TABLE, Option, from_body, put, python_name, renamed, to_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of the ranks and its surroundings, as read from the caller's machine."""

    command: Sequence[str] | str
    resize: Literal["join", "restart"]
    env: Mapping[str, str]
    workdir: str | None = None
    archive: str | None = None


def to_wire(
    name: str,
    request: Deploy,
    program: Program,
    table: Sequence[Option] = TABLE,
    spec: type[DeploymentSpec] = DeploymentSpec,
) -> dict[str, Any]:
    """Return the body of a valid request; `ValidationError` names the invalid keyword."""
    known = _known(name, request, program)
    given: dict[str, Any] = {}
    for option in table:
        value = known[option.attribute] if option.attribute in known else _keyword(request.run, option.name)
        if value is not None:
            put(given, option.path, _plain(value))
    try:
        wanted = from_body(given, table, spec)
    except ValidationError as error:
        raise renamed(error, lambda path: python_name(path, table)) from None
    body = to_body(wanted, table)
    body["distributed"]["enabled"] = True
    return body | {"replicas": wanted.world.target}


def _known(name: str, request: Deploy, program: Program) -> dict[str, Any]:
    """Return the attributes of the run that are not taken unchanged from the keywords."""
    script = program.command if isinstance(program.command, str) else None
    bench = request.run.get("bench")
    return {
        "name": name,
        "program.script": script,
        "program.argv": None if script is not None else [str(part) for part in program.command],
        "program.args": [str(part) for part in request.run.get("args", ())],
        "env": program.env,
        "workdir": program.workdir,
        "archive": program.archive,
        "bench.mode": ("on-start" if bench else "off") if isinstance(bench, bool) else bench,
        "resize": program.resize,
    }


def _keyword(keywords: Mapping[str, Any], name: str) -> Any:
    first, *rest = name.split(".")
    value = keywords.get(first)
    for part in rest if value is not None else ():
        if not hasattr(value, part):
            raise ValidationError(first, type(value).__name__, f"has no `{part}`")
        value = getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    """Return the value for JSON: any collection becomes a list."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else value
