"""`basilica diloco`: runs that live in a bucket, and the plan for one."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from basilica.cli.common import Json
from basilica.cli.run import Backend
from basilica.core.errors import BasilicaError

if TYPE_CHECKING:
    from basilica.diloco.bucket import Bucket
    from basilica.diloco.plan import StoreSpeed

app = typer.Typer(
    help="Inspect, resume and plan training through an object store (DiLoCo).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Uri = Annotated[
    str,
    typer.Argument(
        metavar="URI", help="URI of the object store: file:///…, s3://bucket/prefix, ….", show_default=False
    ),
]
RunId = Annotated[
    str | None, typer.Option("--run-id", help="Id of the run, if the prefix has several.", show_default=False)
]

_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([A-Za-z/]*)")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@app.command("inspect")
def inspect(uri: Uri, *, run_id: RunId = None, as_json: Json = False) -> None:
    """Show the rounds of a run and their replicas, its members, states and sizes.

    \b
    Example:
      basilica diloco inspect s3://bucket/run-7
    """
    from dataclasses import asdict

    from basilica.cli import show_diloco
    from basilica.cli.terminal import show, write_json
    from basilica.diloco.inspection import inspect_run

    with _store_errors():
        found = inspect_run(_bucket(uri, run_id))
    if as_json:
        write_json(asdict(found) | {"unaccounted": found.unaccounted, "troubles": found.troubles})
    else:
        show(show_diloco.run(found))


@app.command("resume")
def resume(
    uri: Uri,
    *,
    run_id: RunId = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", "-n", help="Number of replicas. Default: as before.", min=1)
    ] = None,
    executor: Annotated[Backend, typer.Option(help="Executor of the replicas.")] = Backend.LOCAL,
    entrypoint: Annotated[
        str | None,
        typer.Option(help="Function, package.module:function. Default: the recorded one.", show_default=False),
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", "-a", help="Replace a keyword argument, K=V; repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Option of the executor, K=V, such as image=…; repeatable."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model; each replica has one GPU.", show_default=False)] = None,
    timeout: Annotated[str, typer.Option(help="Time limit of each replica: 90s, 15m, 12h.")] = "1h",
    as_json: Json = False,
) -> None:
    """Resume a stopped run from its last agreed state, on any executor.

    Entrypoint, arguments and number of replicas are read from the store. Rounds after the last agreed state are
    removed, so no replica of the run may still be running. Exits as `basilica run` does.

    \b
    Examples:
      basilica diloco resume s3://bucket/run-7
      basilica diloco resume s3://bucket/run-7 -n 16 --executor eks -o image=registry.example/train:1
    """
    from basilica.cli.run import run
    from basilica.cli.terminal import notify
    from basilica.diloco.inspection import collect_garbage, garbage, inspect_run

    with _store_errors():
        bucket = _bucket(uri, run_id)
        found = inspect_run(bucket)
        record = found.record
        if record is None:
            raise BasilicaError(f"{uri} holds no run.json: the run has never begun; start it with 'basilica run'")
        what = entrypoint or (record.entrypoint if record.importable else None)
        if what is None:
            raise BasilicaError(
                "the run was started by a program of its own, or with a function that was shipped, so it does not know "
                "what to start again; give --entrypoint package.module:function"
            )
        if found.unaccounted:
            ranks = ", ".join(str(rank) for rank in found.unaccounted)
            notify(f"nobody has told how rank {ranks} ended: killed, or still running somewhere; then end it first")
        collect_garbage(bucket, garbage(bucket, unfinished=True))
    arguments = {**record.arguments, **({"rendezvous_uri": uri} if "rendezvous_uri" in record.arguments else {})}
    run(
        what,
        replicas=replicas or record.world_size,
        executor=executor,
        arg=[*(f"{name}={json.dumps(value)}" for name, value in arguments.items()), *(arg or ())],
        option=option,
        gpu=gpu,
        timeout=timeout,
        as_json=as_json,
    )


@app.command("gc")
def gc(
    uri: Uri,
    *,
    run_id: RunId = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete the rounds and states before the last agreed one, which no replica needs.

    On a shared disk, also delete incomplete files of killed writers that are an hour old. Safe while the run is live.

    \b
    Example:
      basilica diloco gc s3://bucket/run-7 --dry-run
    """
    from basilica.cli.show_diloco import size
    from basilica.cli.terminal import write_json, write_line
    from basilica.diloco.inspection import collect_garbage, garbage

    with _store_errors():
        bucket = _bucket(uri, run_id)
        found = garbage(bucket)
        if not dry_run:
            collect_garbage(bucket, found)
    if as_json:
        write_json({"objects": len(found.keys), "bytes": found.size, "removed": not dry_run})
    else:
        verb = "would remove" if dry_run else "removed"
        write_line(f"{verb} {len(found.keys)} objects, {size(found.size)}")


@app.command("plan")
def plan(
    *,
    params: Annotated[
        str, typer.Option(help="Number of parameters of the model: 1.3e9, 125M, 7B.", show_default=False)
    ],
    replicas: Annotated[int, typer.Option(help="Number of replicas.", min=2, show_default=False)],
    link: Annotated[
        str, typer.Option(help="Bandwidth of one replica, per second: 200Mbit, 10Gbit, 50MB.", show_default=False)
    ],
    step: Annotated[str, typer.Option(help="Duration of one inner step: 0.9s, 350ms.", show_default=False)],
    steps: Annotated[
        str | None,
        typer.Option(help="Inner steps of the whole run, to check that it has enough rounds.", show_default=False),
    ] = None,
    goal: Annotated[float, typer.Option(help="Wanted share of time in inner steps.")] = 0.95,
    store_bench: Annotated[
        str | None,
        typer.Option(help="Output file of 'bench --json', or a URI to measure now.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend settings for a link: steps between rounds, fragments, quantization.

    The answer has the expected traffic and share of time in inner steps.

    \b
    Example:
      basilica diloco plan --params 1.3e9 --replicas 8 --link 200Mbit --step 0.9s
    """
    from dataclasses import asdict

    from basilica.cli import show_diloco
    from basilica.cli.terminal import show, write_json
    from basilica.diloco.plan import Question, StoreSpeed, make_plan

    try:
        question = Question(
            params=_quantity(params, _COUNTS, "--params", "1.3e9, 125M or 7B"),
            replicas=replicas,
            link=_quantity(link.removesuffix("/s"), _RATES, "--link", "200Mbit, 10Gbit or 50MB"),
            step_seconds=_quantity(step, _TIMES, "--step", "0.9s or 350ms"),
            goal=goal,
            steps=None if steps is None else round(_quantity(steps, _COUNTS, "--steps", "10000, 24k or 1M")),
            store=StoreSpeed() if store_bench is None else _store_speed(store_bench),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = make_plan(question)
    if as_json:
        write_json(asdict(found) | {"few_rounds": found.few_rounds})
    else:
        show(show_diloco.plan(found, question))


@app.command("bench")
def bench(uri: Uri, *, as_json: Json = False) -> None:
    """Measure the latency and the throughput of an object store from this machine.

    The objects that it writes are deleted.

    \b
    Example:
      basilica diloco bench s3://bucket/tmp --json > store.json
      basilica diloco plan --params 1.3e9 --replicas 8 --link 1Gbit --step 0.9s --store-bench store.json
    """
    from dataclasses import asdict

    from basilica.cli import show_diloco
    from basilica.cli.terminal import show, write_json

    found = _measured(uri)
    if as_json:
        write_json(asdict(found))
    else:
        show(show_diloco.store(found, uri))


# ---- arguments ---------------------------------------------------------------------------------------------------


class _store_errors:
    """Converts a store's own errors into ours by their message, since their packages may not be installed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, BasilicaError | typer.Exit):
            raise BasilicaError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _bucket(uri: str, run_id: str | None) -> "Bucket":
    """Return the named run, or the only one of the prefix."""
    from basilica.diloco.bucket import Bucket
    from basilica.diloco.inspection import find_runs
    from basilica.diloco.stores import open_store

    store = open_store(uri)
    runs = find_runs(store)
    if not runs:
        raise BasilicaError(f"{uri} holds no run of DiLoCo")
    if run_id is None and len(runs) > 1:
        raise BasilicaError(f"{uri} holds the runs {', '.join(runs)}; choose one with --run-id")
    if run_id is not None and run_id not in runs:
        raise BasilicaError(f"{uri} holds no run {run_id!r}, but {', '.join(runs)}")
    return Bucket(store, run_id or runs[0])


def _quantity(text: str, units: Mapping[str, float], option: str, examples: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    unit = None if match is None else units.get(match[2].lower())
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not understood; write {examples}", param_hint=option)
    return float(match[1]) * unit


def _measured(uri: str) -> "StoreSpeed":
    from basilica.cli.terminal import busy
    from basilica.diloco.measure import measure
    from basilica.diloco.stores import open_store

    with _store_errors(), busy(lambda: f"measuring {uri}"):
        return measure(open_store(uri))


def _store_speed(given: str) -> "StoreSpeed":
    from basilica.diloco.plan import StoreSpeed

    if "://" in given:
        return _measured(given)
    try:
        return StoreSpeed(**json.loads(Path(given).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"{given}: {error}", param_hint="--store-bench") from error
