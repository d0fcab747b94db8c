"""`basilica doctor`: what this machine can do, and what to install for the rest."""

import asyncio
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from basilica.cli.common import Json


@dataclass(frozen=True, slots=True)
class Finding:
    """`hint` says what to do about what is missing."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


def doctor(
    as_json: Json = False, strict: Annotated[bool, typer.Option(help="Exit 1 if anything is missing.")] = False
) -> None:
    """Say what this machine can do (cgroups, GPUs, etcd, torchrun) and what to install for the rest.

    \b
    Example:
      basilica doctor --strict
    """
    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in findings]))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "ok     " if finding.ok else "missing"
            typer.echo(f"{mark}  {finding.name:{width}}  {finding.detail}")
            if finding.hint and not finding.ok:
                typer.echo(f"{'':9}{'':{width}}  -> {finding.hint}")
    if strict and not all(f.ok for f in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    linux = sys.platform == "linux"
    yield Finding("platform", linux, f"{platform.system()} {platform.release()}", "Linux is what is supported")
    version = platform.python_version()
    yield Finding("python", sys.version_info >= (3, 11), version, "Python 3.11 or newer")
    from basilica.runtimes.local import cgroups, gpus
    from basilica.runtimes.local.capabilities import capabilities_of

    groups = cgroups.find({os.getpid()}.__contains__)
    for ability in capabilities_of(groups, asyncio.run(gpus.ask_nvidia_smi())):
        yield Finding(ability.name, ability.available, ability.detail, ability.remedy)
    etcd = shutil.which("etcd")
    yield Finding(
        "etcd",
        etcd is not None,
        etcd or "not installed",
        "only for comparing with the real thing: apt-get install etcd-server",
    )
    torch = importlib.util.find_spec("torch") is not None
    torchrun = shutil.which("torchrun")
    yield Finding("torch", torch, "installed" if torch else "not installed", "pip install 'basilica[torch]'")
    yield Finding("torchrun", torchrun is not None, torchrun or "not on the PATH", "it comes with torch")
