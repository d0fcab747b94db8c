"""`basilica doctor`: the machine's capabilities, the packages for the missing ones, and the health of the state."""

import asyncio
import importlib.util
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from basilica.cli.common import Json, StateDir
from basilica.version import pip_install


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `hint` is the next step for a missing capability, or for damage of the state directory."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    kind: Literal["ability", "state"] = "ability"


def doctor(
    *,
    state_dir: StateDir = None,
    as_json: Json = False,
    strict: Annotated[
        bool, typer.Option(help="Exit with 1 if a capability is missing or the state is damaged.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Repair the state directory: end ranks of unknown runs, rebuild "
            "records from run directories, put damaged files aside. Nothing is deleted.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --repair: do not ask for confirmation.")] = False,
) -> None:
    """Check this machine (cgroups, GPUs, etcd, torchrun) and the state directory.

    Each finding that needs an action names it.

    \b
    Examples:
      basilica doctor --strict
      basilica doctor --repair --state-dir /srv/basilica
    """
    from basilica.machine.places import default_state_dir

    directory = state_dir or default_state_dir()
    if repair:
        _repair(directory, as_json=as_json, yes=yes)
        return
    findings = [*examine(), *examine_directory(directory), *examine_memory()]
    if as_json:
        typer.echo(json.dumps([{"name": f.name, "ok": f.ok, "detail": f.detail, "hint": f.hint} for f in findings]))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "ok     " if finding.ok else "missing" if finding.kind == "ability" else "damaged"
            typer.echo(f"{mark}  {finding.name:{width}}  {finding.detail}")
            if finding.hint and not finding.ok:
                typer.echo(f"{'':9}{'':{width}}  -> {finding.hint}")
    if strict and not all(f.ok for f in findings):
        raise typer.Exit(1)


def examine_directory(directory: Path) -> Iterator[Finding]:
    """Check that the state directory is whole, and that no other user can read it."""
    from basilica.wiring.repair import examine_state

    troubles = examine_state(directory)
    if not troubles:
        detail = f"{directory} is whole" if directory.exists() else f"{directory} is not there yet"
        yield Finding("state directory", True, detail, kind="state")
    for trouble in troubles:
        yield Finding("state directory", False, f"{trouble.kind}: {trouble.message}", trouble.remedy, kind="state")
    if directory.exists() and directory.stat().st_mode & 0o010:
        detail = "one of their own: ranks do not reach the server's state, but those of all users share that user"
    else:
        detail = (
            "the server's own: a rank can read the server's state with the secrets and keys of all users; a server of "
            "root can run them as another (basilica serve --run-as USER)"
        )
    yield Finding("user of ranks", True, detail, kind="state")


def examine_memory() -> Iterator[Finding]:
    """Check that no snapshots of a deleted state directory take memory."""
    from basilica.wiring.repair import snapshots_without_owner

    for path, owner in snapshots_without_owner():
        detail = f"{path} has snapshots of {owner}, which is not there any more"
        yield Finding("snapshots in memory", False, detail, f"free the memory: rm -r {path}", kind="state")


def _repair(directory: Path, *, as_json: bool, yes: bool) -> None:
    from basilica.wiring.repair import examine_state, repair_state

    troubles = examine_state(directory)
    if not troubles:
        typer.echo(json.dumps({"troubles": [], "repaired": []}) if as_json else f"{directory} is whole")
        return
    for trouble in troubles:
        typer.echo(f"{trouble.kind}: {trouble.message}", err=as_json)
    if not yes:
        question = "Repair it? Ranks of runs without a record are ended; nothing is deleted"
        typer.confirm(question, abort=True, err=as_json)
    done = repair_state(directory)
    if as_json:
        typer.echo(json.dumps({"troubles": [asdict(t) for t in troubles], "repaired": [asdict(d) for d in done]}))
        return
    for repaired in done:
        typer.echo(f"{repaired.kind}: {repaired.subject}: {repaired.done}")
    typer.echo("start the server again: basilica serve")


def examine() -> Iterator[Finding]:
    linux = sys.platform == "linux"
    yield Finding("platform", linux, f"{platform.system()} {platform.release()}", "Linux is what is supported")
    version = platform.python_version()
    yield Finding("python", sys.version_info >= (3, 11), version, "Python 3.11 or newer")
    from basilica.wiring.local import examine_machine

    for ability in asyncio.run(examine_machine()):
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
    yield Finding("torch", torch, "installed" if torch else "not installed", pip_install("torch"))
    yield Finding("torchrun", torchrun is not None, torchrun or "not on the PATH", "it comes with torch")
