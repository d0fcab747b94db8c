"""`basilica train up` and `rerun`: start a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from basilica.cli.common import Json, seconds
from basilica.cli.train import options as given
from basilica.cli.train.common import Name, client, handle
from basilica.cli.train.wait import go_on
from basilica.core.spec import GRACE_SECONDS, NOTICE_SECONDS

if TYPE_CHECKING:
    from basilica.client.training import DistributedTraining

Wait = Annotated[bool, typer.Option("--wait", help="Wait until the run has ended, and exit as it did.")]
Logs = Annotated[bool, typer.Option("--logs", help="With --wait: print the logs of ranks.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return at once, without waiting for ranks to start.")]
Remove = Annotated[bool, typer.Option("--rm", help="With --wait: delete the run after its end.")]
Timeout = Annotated[
    str | None,
    typer.Option(help="Longest wait: 90s, 15m.", show_default="10m for min ranks, no limit with --wait"),
]


def _duration(help: str, default: str) -> Any:
    return typer.Option(help=f"{help}: 90s, 15m, 12h.", show_default=default)


def up(
    context: typer.Context,
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of the run; generated if absent.", show_default=False),
    ] = None,
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT.py", help="Python script to run; ARGS are its arguments.", show_default=False),
    ] = None,
    world_size: Annotated[str, typer.Option(metavar="N|MIN:TARGET:MAX", help="Number of ranks.", show_default=False)],
    command: Annotated[
        str | None, typer.Option(help="Command line for /bin/sh, instead of '-- COMMAND...'.", show_default=False)
    ] = None,
    gpu_count: Annotated[int | None, typer.Option(help="Number of GPUs of each rank.", show_default="1", min=0)] = None,
    gpu_model: Annotated[list[str] | None, typer.Option(help="Acceptable GPU model; repeatable. Default: any.")] = None,
    min_gpu_memory_gb: Annotated[int | None, typer.Option(help="Minimum memory of each GPU, in GB.", min=0)] = None,
    image: Annotated[str | None, typer.Option(help="Container image of ranks, on a cluster.")] = None,
    cpu: Annotated[str | None, typer.Option(help="CPU cores of each rank: 8, 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each rank: 32Gi, 512Mi.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that ranks listen on.", min=1, max=65535)] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", help="Environment variable K=V, or K to pass its current value; repeatable."),
    ] = None,
    env_file: Annotated[Path | None, typer.Option(help="File with lines K=V; --env has precedence.")] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            help="Like --env, but never shown. K alone keeps the value out of the shell's history; repeatable."
        ),
    ] = None,
    nccl_env: Annotated[list[str] | None, typer.Option(help="NCCL variable K=V; repeatable.")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="Allowed providers: a,b.")] = None,
    exclude_provider: Annotated[list[str] | None, typer.Option(help="Excluded providers: a,b.")] = None,
    topology_spread: Annotated[
        Literal["pack", "provider-aware", "region-aware", "none"] | None,
        typer.Option(help="Placement of ranks over providers and regions.", show_default="pack"),
    ] = None,
    bench: Annotated[
        Literal["on-start", "off"] | None,
        typer.Option(
            help="Measure the network between ranks. --bench alone: on-start; --no-bench: off.", show_default="off"
        ),
    ] = None,
    bench_placement: Annotated[
        Literal["preferred", "strict"] | None,
        typer.Option(
            help="Whether the bench may run on other nodes (preferred) or not (strict).", show_default="preferred"
        ),
    ] = None,
    rendezvous_backend: Annotated[
        Literal["etcd-v2", "c10d", "static"] | None,
        typer.Option(help="Rendezvous backend of ranks.", show_default="etcd-v2"),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Launcher of a script: python or torchrun, with its options: 'torchrun --nproc-per-node=2'.",
            show_default="python",
        ),
    ] = None,
    pip: Annotated[list[str] | None, typer.Option(help="Package to install for a script; repeatable.")] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            help="Working directory of ranks; it is uploaded to a remote server.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Maximum number of restarts of a failed rank.", show_default="0", min=0)
    ] = None,
    on_stall: Annotated[
        Literal["show", "restart"] | None,
        typer.Option(help="Action for a rank that has stopped reporting.", show_default="show"),
    ] = None,
    grace: Annotated[str | None, _duration("Time that a rank has to stop", f"{GRACE_SECONDS:g}s")] = None,
    notice: Annotated[
        str | None, _duration("Time that a planned change waits for ranks to be ready", f"{NOTICE_SECONDS:g}s")
    ] = None,
    notice_signal: Annotated[
        Literal["SIGUSR1", "SIGUSR2"] | None,
        typer.Option(help="Signal that ranks get when a planned change is announced.", show_default="none"),
    ] = None,
    ttl: Annotated[str | None, _duration("Cancel the run after", "no limit")] = None,
    deadline: Annotated[str | None, _duration("Fail the run if it has not ended after", "no limit")] = None,
    start_deadline: Annotated[str | None, _duration("Fail the run if min ranks are not up after", "no limit")] = None,
    resize: Annotated[
        Literal["join", "restart"] | None,
        typer.Option(
            help="Whether running ranks continue (join) or restart when the size changes.",
            show_default="join; a script: restart",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Go on from the progress of an ended run: its newest step, or that one.",
            show_default=False,
        ),
    ] = None,
    checkpoint_uri: Annotated[
        str | None,
        typer.Option(help="Bucket or directory for snapshots, too: s3://, gs://, az://, file://.", show_default=False),
    ] = None,
    timeout: Timeout = None,
    wait: Wait = False,
    logs: Logs = False,
    detach: Detach = False,
    remove: Remove = False,
    as_json: Json = False,
) -> None:
    """Start a run of a command after '--', or of a Python script.

    Returns once the minimum of ranks is up, or the run has ended.

    With --wait, waits for the end and exits with 0 if the run succeeded, the culprit's own code if it failed, 130
    if it was cancelled, 124 if the time was up, 125 if detached. Ctrl-C asks whether to detach or to cancel; where
    there is no terminal to ask at, it cancels the run and waits for its end. SIGTERM detaches.

    \b
    Examples:
      basilica train up llama --world-size 2:4:8 -- python train.py --epochs 3
      basilica train up --world-size 2 --wait --logs train.py -- --epochs 3
      basilica train up llama --world-size 4 --secret WANDB_API_KEY --max-restarts 2 -d train.py
      basilica train up llama --world-size 4 --from llama@1200 train.py
    """
    from basilica.cli.terminal import busy, uploading
    from basilica.core.spec import ProviderFilter

    _check_flags(wait=wait, detach=detach, logs=logs, remove=remove)
    words = [word for word in (name, script, *context.args) if word is not None]
    what = given.program(words, context.meta[given.REST], command)
    limit = None if timeout is None else seconds(timeout)
    include, exclude = given.names(provider or ()), given.names(exclude_provider or ())
    variables = given.env_file(env_file) if env_file is not None else {}
    settings: dict[str, Any] = {
        "world_size": given.world_size(world_size),
        "command": what.command,
        "source": what.script,
        "args": what.args,
        "launcher": launcher,
        "pip_packages": pip,
        "image": image,
        "port": port,
        "gpu_count": gpu_count,
        "gpu_models": gpu_model,
        "min_gpu_memory_gb": min_gpu_memory_gb,
        "cpu": cpu,
        "memory": memory,
        "env": variables | given.variables(env or (), "--env"),
        "secrets": given.variables(secret or (), "--secret"),
        "nccl_env": given.variables(nccl_env or (), "--nccl-env"),
        "provider_filter": ProviderFilter(include, exclude) if include or exclude else None,
        "topology_spread": topology_spread,
        "bench": bench,
        "bench_placement": bench_placement,
        "rendezvous_backend": rendezvous_backend,
        "workdir": workdir,
        "resize": resize,
        "max_restarts": max_restarts,
        "on_stall": on_stall,
        "grace_seconds": _seconds(grace),
        "notice_seconds": _seconds(notice),
        "notice_signal": notice_signal,
        "ttl_seconds": _seconds(ttl),
        "deadline_seconds": _seconds(deadline),
        "start_deadline_seconds": _seconds(start_deadline),
        "resume_from": from_,
        "checkpoint_uri": checkpoint_uri,
    }
    wanted = {name: value for name, value in settings.items() if value is not None}  # the SDK knows the defaults
    training: DistributedTraining
    api = client()
    if workdir is not None and not api.is_embedded:
        with uploading(f"shipping {workdir}") as advance:
            training = api.deploy_distributed(what.name, **wanted, on_upload=advance, wait=False)
    else:
        with busy(lambda: "starting the run"):
            training = api.deploy_distributed(what.name, **wanted, wait=False)
    go_on(training, wait=wait, detach=detach, logs=logs, remove=remove, timeout=limit, as_json=as_json)


def rerun(
    name: Name,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the progress of that run, which has to have ended.")
    ] = False,
    timeout: Timeout = None,
    wait: Wait = False,
    logs: Logs = False,
    detach: Detach = False,
    remove: Remove = False,
    as_json: Json = False,
) -> None:
    """Start a new run with the settings of an earlier one; the options are those of `up`.

    \b
    Examples:
      basilica train rerun llama
      basilica train rerun llama --wait --logs
      basilica train rerun llama --resume
    """
    from basilica.cli.terminal import busy

    _check_flags(wait=wait, detach=detach, logs=logs, remove=remove)
    limit = _seconds(timeout)
    before = handle(name)
    with busy(lambda: "starting the run"):
        training = before.rerun(resume=resume)
    go_on(training, wait=wait, detach=detach, logs=logs, remove=remove, timeout=limit, as_json=as_json)


def _check_flags(*, wait: bool, detach: bool, logs: bool, remove: bool) -> None:
    if wait and detach:
        raise typer.BadParameter("--wait and --detach exclude each other", param_hint="--detach")
    for option, wanted in (("--rm", remove), ("--logs", logs)):
        if wanted and not wait:
            raise typer.BadParameter("goes with --wait", param_hint=option)


def _seconds(text: str | None) -> float | None:
    return None if text is None else seconds(text)
