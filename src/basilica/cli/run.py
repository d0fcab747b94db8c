"""`basilica run`: replicas of a function on one of the executors, from their start to their end."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from basilica.cli.common import Json, seconds
from basilica.core.errors import BasilicaError

if TYPE_CHECKING:
    from basilica.executors.protocol import ReplicaHandle, ReplicaResult, ServerlessExecutor

LINES_SHOWN = 40  # of each replica that failed
RESULT_SHOWN = 2000  # characters of one result in the table
MOST_LISTED = 8
CANCEL_SECONDS = 30.0


class Backend(StrEnum):
    """The executor of the replicas."""

    LOCAL = "local"
    EKS = "eks"
    SAGEMAKER = "sagemaker"
    MODAL = "modal"
    BASILICA = "basilica"


CLASSES = {
    Backend.LOCAL: "LocalProcessExecutor",
    Backend.EKS: "EKSExecutor",
    Backend.SAGEMAKER: "SageMakerExecutor",
    Backend.MODAL: "ModalSpawnExecutor",
    Backend.BASILICA: "BasilicaExecutor",
}

CANCELLED_TOGETHER = frozenset({"eks", "basilica"})  # the cancellation of one replica ends its whole gang
HOW_TO_END = {
    "local": "what was told to end is killed when its grace is over, and the rest when this command has ended",
    "eks": "kubectl delete job {job_name} --namespace {namespace}",
    "sagemaker": "aws sagemaker stop-training-job --training-job-name {job_name}",
    "modal": "python -c 'import modal; modal.FunctionCall.from_id(\"{function_call_id}\").cancel()'",
    "basilica": "basilica train cancel {job_name}",
}


def run(
    entrypoint: Annotated[
        str,
        typer.Argument(
            metavar="ENTRYPOINT",
            help="Function of each replica: package.module:function, a module, or FILE.py:function.",
            show_default=False,
        ),
    ],
    *,
    replicas: Annotated[int, typer.Option("--replicas", "-n", help="Number of replicas.", min=1)] = 1,
    executor: Annotated[Backend, typer.Option(help="Executor of the replicas.")] = Backend.LOCAL,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", "-a", help="Keyword argument K=V; V is JSON, else text; repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Option of the executor, K=V, such as image=…; repeatable."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model; each replica has one GPU.", show_default=False)] = None,
    timeout: Annotated[str, typer.Option(help="Time limit of each replica: 90s, 15m, 12h.")] = "1h",
    as_json: Json = False,
) -> None:
    """Run replicas of a function on an executor, and print their results.

    Exits with 0 if all succeeded, with the exit code of the replica that failed first, and with 130 if they were
    cancelled. Ctrl-C and SIGTERM cancel the replicas, wait for their end, and list those that still run; a second
    Ctrl-C stops waiting. The last output of failed replicas is printed to stderr.

    \b
    Examples:
      basilica run my_package.train:main -n 4 --arg steps=100 --arg 'layers=[64, 64]'
      basilica run train.py:main -n 2 --gpu A100 --timeout 12h
      basilica run train:main -n 8 --executor eks -o image=registry.example/train:1 -a rendezvous_uri=s3://bucket/run
    """
    arguments = _pairs(arg or (), "--arg")
    limit = seconds(timeout)
    what = _importable(entrypoint)
    place = _executor(executor, _pairs(option or (), "--option"))
    with _interruptible():
        handles = _launch(place, replicas, what, arguments, gpu=gpu, limit=limit)
        try:
            results = _collect(place, handles, executor, quiet=as_json)
        except KeyboardInterrupt:
            _cancel(place, handles, as_json=as_json)
        except Exception as error:  # an error of the backend; the replicas may still run
            raise BasilicaError(f"{executor}: {_words(error)}; {_may_still_run(handles)}") from error
        _finish(place, handles, results, as_json=as_json)


# ---- arguments ---------------------------------------------------------------------------------------------------


def _pairs(given: Sequence[str], option: str) -> dict[str, Any]:
    """Parse `K=V`, with V as JSON where it parses, else as text."""
    found: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{item!r} is not of the form NAME=VALUE", param_hint=option)
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _importable(entrypoint: str) -> str:
    """Return the entrypoint as replicas import it: from the current directory, and from a file's own."""
    sys.path.insert(0, os.getcwd())
    file, colon, function = entrypoint.partition(":")
    if not file.endswith(".py"):
        return entrypoint
    path = Path(file)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {file!r}", param_hint="ENTRYPOINT")
    if not path.stem.isidentifier():
        raise typer.BadParameter(f"{path.name!r} cannot be imported: rename it", param_hint="ENTRYPOINT")
    sys.path.insert(0, str(path.parent.absolute()))
    return f"{path.stem}{colon}{function}"


def _executor(backend: Backend, options: Mapping[str, Any]) -> "ServerlessExecutor":
    import inspect

    from basilica import executors

    kind = getattr(executors, CLASSES[backend])
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        problem = f"{kind.__name__}: {error}; give its options as -o NAME=VALUE"
        raise typer.BadParameter(problem, param_hint="--option") from None
    try:
        made: ServerlessExecutor = kind(**options)
    except (ValueError, RuntimeError) as error:
        raise BasilicaError(str(error)) from error
    return made


# ---- from start to end -------------------------------------------------------------------------------------------


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: both cancel the replicas."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _launch(
    executor: "ServerlessExecutor",
    replicas: int,
    entrypoint: str,
    arguments: Mapping[str, Any],
    *,
    gpu: str | None,
    limit: float,
) -> "list[ReplicaHandle]":
    from basilica.cli.terminal import busy

    try:
        with busy(lambda: "starting the replicas"):
            return executor.launch_replicas(replicas, entrypoint, arguments, gpu=gpu, timeout=limit)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    except BasilicaError:
        raise
    except Exception as error:  # an error of a package that may not be installed: only its message is usable
        raise BasilicaError(f"{executor.backend_name}: {_words(error)}") from error


def _collect(
    executor: "ServerlessExecutor", handles: "Sequence[ReplicaHandle]", backend: Backend, *, quiet: bool
) -> "list[ReplicaResult]":
    from basilica.executors.progress import live_table

    if quiet:
        return executor.collect(handles)
    with live_table(handles, title=f"{handles[0].metadata.get('job_name', '')} on {backend}") as on_change:
        return executor.collect(handles, on_change=on_change)


def _cancel(executor: "ServerlessExecutor", handles: "Sequence[ReplicaHandle]", *, as_json: bool) -> NoReturn:
    """Cancel all replicas, wait for their end, and list those that are left; exit at once after a second Ctrl-C."""
    from basilica.cli.terminal import notify, write_json
    from basilica.cli.train.outcome import CANCELLED
    from basilica.executors.protocol import ENDED

    notify("cancelling; Ctrl-C again stops waiting for it")
    results: list[ReplicaResult] = []
    waited = False
    with suppress(KeyboardInterrupt):
        _cancel_all(executor, handles)
        try:
            results = executor.collect(handles, timeout=CANCEL_SECONDS)
        except Exception as error:  # noqa: BLE001  most likely the error that made the cancellation fail
            notify(f"could not wait for the end: {_words(error)}")
        waited = True
    left = [handle for handle, result in zip(handles, results, strict=False) if result["status"] not in ENDED]
    left += list(handles[len(results) :])
    notify(_may_still_run(left) if left else f"cancelled; nothing is left of {len(handles)} replicas")
    if as_json:
        write_json(results)
    if not waited:
        sys.stdout.flush()
        os._exit(CANCELLED)  # an ordinary exit would wait for local replicas
    raise typer.Exit(CANCELLED)


def _cancel_all(executor: "ServerlessExecutor", handles: "Sequence[ReplicaHandle]") -> None:
    from basilica.cli.terminal import notify

    together = executor.backend_name in CANCELLED_TOGETHER
    for handle in handles[:1] if together else handles:
        try:
            executor.cancel(handle)
        except Exception as error:  # noqa: BLE001  the others are still to be cancelled
            notify(f"could not cancel {'the gang' if together else f'rank {handle.rank}'}: {_words(error)}")


def _may_still_run(handles: "Sequence[ReplicaHandle]") -> str:
    """Return the message that names the replicas that may still run, and how to end them."""
    backend = handles[0].backend_name
    jobs = sorted({str(handle.metadata.get("job_name")) for handle in handles})
    ranks = _listed([str(handle.rank) for handle in handles])
    ways = sorted({HOW_TO_END[backend].format(**handle.metadata) for handle in handles})
    return f"may still run: {_listed(jobs)} on {backend}, rank {ranks} ({_listed(ways, '; ')})"


def _listed(items: Sequence[str], between: str = ", ") -> str:
    more = len(items) - MOST_LISTED
    return between.join(items[:MOST_LISTED]) + (f"{between}and {more} more" if more > 0 else "")


def _words(error: Exception) -> str:
    """Return an error's message. Clients of Kubernetes show the whole answer, of which only `message` is for people."""
    with suppress(TypeError, ValueError, KeyError):
        return str(json.loads(getattr(error, "body", None) or "")["message"])
    return str(error) or type(error).__name__


def _finish(
    executor: "ServerlessExecutor",
    handles: "Sequence[ReplicaHandle]",
    results: "list[ReplicaResult]",
    *,
    as_json: bool,
) -> NoReturn:
    from basilica.cli.terminal import show, write_json
    from basilica.executors.protocol import FAILED, STOPPED

    failed = [(handle, result) for handle, result in zip(handles, results, strict=True) if result["status"] == FAILED]
    if failed:
        own = [handle for handle, result in failed if result.get("role") != STOPPED]
        _show_logs(executor, own or [handle for handle, _ in failed])
    if as_json:
        write_json(results)
    else:
        show(_table(results))
    raise typer.Exit(_exit_code(results))


def _show_logs(executor: "ServerlessExecutor", handles: "Sequence[ReplicaHandle]") -> None:
    from basilica.cli.show import rank_line
    from basilica.cli.terminal import notify, show
    from basilica.executors.protocol import gather_logs

    for line in gather_logs(executor, handles[:MOST_LISTED], n_lines=LINES_SHOWN).splitlines():
        rank, _, text = line.partition("| ")
        show(rank_line(int(rank), text, whole=True), sys.stderr)
    if len(handles) > MOST_LISTED:
        notify(f"what {len(handles) - MOST_LISTED} more failed ranks wrote is not shown")


def _table(results: "Sequence[ReplicaResult]") -> Any:
    from rich.table import Table
    from rich.text import Text

    from basilica.cli.show import clean, rank_colour
    from basilica.executors.progress import COLOURS

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("RANK", "STATUS", "CODE"):
        table.add_column(heading, no_wrap=True)
    table.add_column("RESULT", overflow="fold")
    for result in results:
        code = result["exit_code"]
        text = result["error"] or _shortened("" if result["result"] is None else json.dumps(result["result"]))
        table.add_row(
            Text(str(result["rank"]), rank_colour(result["rank"])),
            Text(result["status"], COLOURS.get(result["status"], "")),
            "-" if code is None else str(code),
            Text(clean(text)),
        )
    return table


def _shortened(text: str) -> str:
    if len(text) <= RESULT_SHOWN:
        return text
    return f"{text[:RESULT_SHOWN]}… ({len(text):,} characters; --json has them all)"


def _exit_code(results: "Sequence[ReplicaResult]") -> int:
    """Return the exit code of the replica that failed first, if known; else of the first one that was not stopped."""
    from basilica.cli.train.outcome import CANCELLED
    from basilica.cli.train.outcome import FAILED as UNKNOWN
    from basilica.executors.protocol import CULPRIT, FAILED, STOPPED, SUCCEEDED, VICTIM

    failed = [result for result in results if result["status"] == FAILED]
    if failed:
        order = [CULPRIT, None, VICTIM, STOPPED]
        code = min(failed, key=lambda result: order.index(result.get("role")))["exit_code"] or UNKNOWN
        return code if 1 <= code <= 255 else UNKNOWN
    return 0 if all(result["status"] == SUCCEEDED for result in results) else CANCELLED
