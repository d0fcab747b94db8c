"""Writes the reference pages from the code: `python -m tools.reference`. `make verify` compares them as whole files."""

import asyncio
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any, is_typeddict

import click
import typer

import basilica
from basilica.cli.main import app as cli
from basilica.controller.plane import ControlPlane, Settings
from basilica.core import errors as errors_module
from basilica.kube.manifests.crd import definition
from basilica.kube.manifests.yaml import to_yaml
from basilica.machine.clocks import SteadyClock
from basilica.server.app import build_app
from basilica.server.metrics import Metrics
from basilica.stores.memory import MemoryKeys, MemoryStore
from basilica.testing.fake_runtime import FakeRuntime

DOCS = Path(__file__).parents[1] / "docs" / "reference"
DEPLOY = Path(__file__).parents[1] / "deploy"
NOTICE = "<!-- Written by `make verify` from the code; edit that. -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated file with its contents."""
    document = openapi()
    return {
        DOCS / "rest.md": NOTICE + rest_page(document),
        DOCS / "openapi.json": json.dumps(document, indent=1, sort_keys=True) + "\n",
        DOCS / "cli.md": NOTICE + cli_page(),
        DOCS / "sdk.md": NOTICE + sdk_page(),
        DEPLOY / "crd.yaml": to_yaml([definition()]),
    }


def openapi() -> dict[str, Any]:
    plane = ControlPlane(MemoryStore(), FakeRuntime(), SteadyClock(), Settings())
    return build_app(plane, MemoryKeys(), Metrics(), asyncio.Event()).openapi()


def rest_page(document: dict[str, Any]) -> str:
    lines = [
        "# REST API",
        "",
        "JSON over HTTP, with `Authorization: Bearer KEY`. The whole of it, with every field, is in",
        "[openapi.json](openapi.json), which a server also answers at `/openapi.json`.",
        "",
        'Errors have one shape: `{"error": {"code", "message", "timestamp", "retryable", "details"}}`.',
        "",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += [f"## {method.upper()} {path}", ""]
            lines += [operation.get("description", operation["summary"]), ""]
            parameters = [p for p in operation.get("parameters", ()) if p["in"] != "path"]
            if parameters:
                lines += ["| parameter | in | type | default |", "|---|---|---|---|"]
                lines += [_parameter(p) for p in parameters]
                lines += [""]
            body = operation.get("requestBody")
            if body:
                lines += [*_body(document, body), ""]
    return "\n".join(lines).rstrip() + "\n"


def _parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    default = schema.get("default", "")
    return f"| `{parameter['name']}` | {parameter['in']} | {_type(schema)} | {default} |"


def _body(document: dict[str, Any], body: dict[str, Any]) -> list[str]:
    if "application/json" not in body["content"]:
        return [f"Body: `{', '.join(body['content'])}`"]
    lines = ["Body:", "", "| field | type | default | meaning |", "|---|---|---|---|"]
    schema = body["content"]["application/json"]["schema"]
    return lines + _fields(document, schema["$ref"], "")


def _fields(document: dict[str, Any], reference: str, prefix: str) -> list[str]:
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    rows = []
    for name, field in schema.get("properties", {}).items():
        nested = _reference(field)
        if nested:
            rows += _fields(document, nested, f"{prefix}{name}.")
        else:
            required = "required" if name in schema.get("required", ()) else json.dumps(field.get("default"))
            rows.append(f"| `{prefix}{name}` | {_type(field)} | {required} | {field.get('description', '')} |")
    return rows


def _reference(field: dict[str, Any]) -> str | None:
    for option in (field, *field.get("anyOf", ())):
        if "$ref" in option:
            return str(option["$ref"])
    return None


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    if kind == "object":
        return "map of strings"
    return kind


def cli_page() -> str:
    command = typer.main.get_command(cli)
    lines = ["# Command line", ""]
    for name, sub in _walk(command, "basilica"):
        context = click.Context(sub, info_name=name, terminal_width=100, max_content_width=100)
        lines += [f"## {name}", "", "```text", sub.get_help(context).rstrip(), "```", ""]
    lines += [
        "## Exit codes",
        "",
        "| code | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | an error, printed in one line on stderr |",
        "| 2 | wrong usage |",
        "",
        "Commands that wait for a run have more: [exit codes](exit-codes.md).",
    ]
    return "\n".join(lines) + "\n"


def sdk_page() -> str:
    """Every public name with its signature and docstring; twins that await are named beside what they twin."""
    lines = ["# Python SDK", "", "Everything below is in the package `basilica`.", ""]
    values = {name: getattr(basilica, name) for name in basilica.__all__ if not name.startswith("__")}
    errors = {n: v for n, v in values.items() if isinstance(v, type) and issubclass(v, Exception)}
    for name, value in values.items():
        if name in errors:
            continue
        lines += [f"## {name}", "", *_code(_signature(name, value)), *_doc(value)]
        if isinstance(value, type):
            lines += _members(value)
    lines += ["## Exceptions", "", "```text", inspect.cleandoc(errors_module.__doc__ or ""), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _members(owner: type) -> list[str]:
    lines: list[str] = []
    for name, member in vars(owner).items():
        if name.startswith("_") or name.endswith("_async"):
            continue
        if isinstance(member, property):
            lines += [f"- `{name}`" + (f": {inspect.cleandoc(member.__doc__)}" if member.__doc__ else "")]
        elif inspect.isfunction(member):
            twin = f" Awaitable: `{name}_async`." if hasattr(owner, f"{name}_async") else ""
            doc = inspect.cleandoc(member.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            lines += [f"- `{_signature(name, member)}`: {doc}{twin}"]
    for name, kind in getattr(owner, "__annotations__", {}).items():
        if (not name.startswith("_") and name not in vars(owner).get("__slots__", ())) or is_typeddict(owner):
            lines += [f"- `{name}`: `{_kind(kind)}`"]
    return [*lines, ""] if lines else []


def _kind(kind: object) -> str:
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b(?:basilica|collections|typing|pathlib)(?:\.\w+)*\.(\w+)", r"\1", text)


def _signature(name: str, value: object) -> str:
    if not callable(value) or is_typeddict(value):
        return name
    return _kind(f"{name}{inspect.signature(value)}").replace("(self, ", "(").replace("(self)", "()")


def _code(text: str) -> list[str]:
    return ["```text", *textwrap.wrap(text, 110, subsequent_indent="    "), "```", ""]


def _doc(value: object) -> list[str]:
    text = inspect.cleandoc(getattr(value, "__doc__", "") or "").replace("# doctest: +SKIP", "").strip()
    lines = [line.rstrip() for line in text.splitlines()]
    out: list[str] = []
    for line in lines:
        out.append(f"    {line}" if line.startswith((">>>", "...")) else line)
    return [*out, ""] if text else []


def _walk(command: Any, name: str) -> list[tuple[str, Any]]:
    found = [(name, command)]
    for sub in getattr(command, "commands", {}).values():
        found += _walk(sub, f"{name} {sub.name}")
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(DOCS.parents[1]))
