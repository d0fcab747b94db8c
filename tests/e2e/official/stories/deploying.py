"""Ways to deploy."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e.official.published import OLDER, User, basilica, in_a_hurry, outcome, story, until

SHOW = 'echo "0=$0 1=$1 2=$2"; echo "NCCL=$NCCL_DEBUG mine=$MINE"; tr "\\0" "|" < /proc/$$/cmdline'


@story
def a_command_runs_in_a_shell_with_its_variables_expanded(user: User) -> Any:
    training = user.deploy(
        "command",
        ["echo", "rank=$BASILICA_RANK", "min=$BASILICA_WORLD_MIN", "target=$BASILICA_WORLD_TARGET", "a  b"],
    )
    return sorted(training.logs(follow=True).splitlines())


@story
def a_script_gets_arguments_and_environment(user: User) -> Any:
    settings: dict[str, Any] = {"env": {"MINE": "it's $5"}, "nccl_env": {"NCCL_DEBUG": "WARN"}, "size": (1, 1, 1)}
    training = user.shell("script", SHOW, args=["first", "a b"], **settings)
    return training.logs(follow=True).splitlines()


@story
def the_default_gpu_of_the_client_is_no_obstacle_without_gpus(user: User) -> Any:
    client = user.client
    deploy = client.deploy_distributed if OLDER else client._deploy_distributed_impl
    training = deploy(
        name="default-gpu", command=["true"], world_size=basilica.WorldSize(min=1, target=1, max=1), timeout=15
    )
    user.until_phase(training, "succeeded")
    return [e for e in training.events() if e["reason"] == "GPUsUnavailable"]


@story
def a_decorated_function_is_shipped_and_run(user: User) -> Any:
    """torchrun is a double that runs the script with plain Python; it is first on the ranks' PATH."""
    settings = user.settings("function", size=(1, 2, 4), env={"PATH": user.torchrun_path})

    @basilica.distributed(**settings)  # type: ignore[untyped-decorator]
    def train() -> None:
        import os

        print("trained by rank", os.environ["BASILICA_RANK"], flush=True)

    training = train()  # with a client made from the environment
    name = train.training.name
    lines = sorted(training.logs(follow=True).splitlines())
    return {"name": training.name, "same": name, "lines": lines, "phase": user.phase(training)}


@story
def functions_deployed_at_once_do_not_mix(user: User) -> Any:
    gate = user.gate("go")

    def first() -> None:
        print("this is the first", flush=True)

    def second() -> None:
        print("this is the second", flush=True)

    def deploy(function: Any, **env: str) -> Any:
        settings = user.settings(function.__name__, env={"PATH": user.torchrun_path, **env}, size=(2, 2, 2))
        return basilica.distributed(**settings)(function).deploy(client=user.client)

    early = deploy(first, GATE=str(gate.path))  # has its source, and does not run it yet
    late = deploy(second)
    late_lines = late.logs(follow=True).splitlines()
    gate.open()
    early_lines = early.logs(follow=True).splitlines()

    def said(lines: list[str]) -> list[str]:
        return sorted(line for line in lines if "torchrun" not in line)

    return {"first": said(early_lines), "second": said(late_lines)}


@story
def sources_of_0_29_0_are_shipped_and_run(user: User) -> Any:
    def train() -> None:
        print("from a function", flush=True)

    path = user.directory / "train.py"
    path.write_text("print('from a file')\n")

    def lines_of(number: int, source: Any) -> list[str]:
        settings = user.settings(f"source-{number}", size=(1, 1, 1), env={"PATH": user.torchrun_path})
        training = user.client.deploy_distributed(source=source, **settings)
        lines: list[str] = training.logs(follow=True).splitlines()
        user.until_phase(training, "succeeded")
        return lines

    with ThreadPoolExecutor() as pool:
        return list(pool.map(lines_of, range(4), (train, "print('from text')", path, str(path))))


@story
def a_job_that_ends_between_two_looks_was_deployed(user: User) -> Any:
    training = user.deploy("short", ["true"], size=(2, 2, 2))
    user.until_phase(training, "succeeded")
    return {"world": outcome(lambda: training.world)["returned"], "listed": user.client.get(training.name).state}


@story
@in_a_hurry
def a_job_that_fails_at_once_is_not_deployed(user: User) -> Any:
    deployed = outcome(lambda: user.shell("fails-at-once", "echo no data >&2; exit 3", size=(1, 1, 1), timeout=1))
    found = until(
        lambda: outcome(lambda: user.client.get_by_name("fails-at-once").phase),
        lambda seen: seen.get("returned") not in ("pending", "starting"),
    )
    return {"deployed": deployed, "found": found}


@story
def a_name_is_free_again_when_its_run_has_ended(user: User) -> Any:
    gate = user.gate("go")
    first = user.shell("same-name", gate.wait)
    refused = outcome(lambda: user.deploy("same-name", ["true"]))
    gate.open()
    user.until_phase(first, "succeeded")
    second = user.deploy("same-name", ["true"])
    newest = user.client.get_by_name("same-name").name
    return {"first": first.name, "refused": refused, "second": second.name, "newest": newest}


@story
@in_a_hurry
def the_async_calls_do_the_same(user: User) -> Any:
    gate = user.gate("go")

    async def tell() -> dict[str, Any]:
        training = await user.deploy_async("async", ["sh", "-c", f"echo up; {gate.wait}"])
        await training.wait_until_min_world_async(timeout=15)
        scaled = await training.scale_async(3)
        await training.wait_until_target_world_async(timeout=15)
        ready = training.world.ready
        metrics = await training.metrics_async()
        gate.open()
        logs = await training.logs_async(follow=True)
        events = await training.events_async()
        streamed = [line async for line in training.stream_logs_async()]
        await training.delete_async()
        gone = await asyncio.to_thread(until, lambda: outcome(training.refresh), lambda seen: "raised" in seen)
        return {
            "scaled": scaled.target,
            "ready": ready,
            "metrics": metrics.world_ready,
            "logs": sorted(logs.splitlines()),
            "streamed": sorted(streamed),
            "reasons": sorted({event["reason"] for event in events}),
            "gone": gone["raised"],
        }

    return asyncio.run(tell())


@story
def leaving_the_with_block_deletes_the_run(user: User) -> Any:
    pids = user.directory / "pid"
    with user.shell("with-block", f"echo $$ > '{pids}'; exec sleep 600", size=(1, 1, 1)) as training:
        inside = training.phase
    found = until(lambda: outcome(training.refresh), lambda seen: "raised" in seen)
    return {
        "inside": inside,
        "afterwards": found["raised"],
        "rank_runs": Path("/proc", pids.read_text().strip()).exists(),
    }
