"""Deployments without a `distributed` block: a few equal processes that stay up."""

import asyncio
from pathlib import Path
from typing import Any

from tests.e2e.official.published import User, in_a_hurry, outcome, story, until

SERVE = "import os, time; print('serving as', os.environ['WHO'], flush=True); time.sleep(600)"


@story
@in_a_hurry
def a_plain_deployment_runs_its_command_as_it_stands(user: User) -> Any:
    created = user.client.create_deployment(
        "plain",
        "img:1",
        replicas=2,
        command=["sh", "-c", 'echo "$0 $1 got $WHO"; exec sleep 600'],
        args=["zero", "a b"],
        env={"WHO": "$HOME"},
        storage="/data",
        ttl_seconds=600,
    )
    deployment = user.client.get(created.instance_name)
    status = deployment.wait_until_ready(timeout=15, poll_interval=1, silent=True)
    lines = until(lambda: sorted(deployment.logs().splitlines()), lambda seen: len(seen) == 2)
    deployment.delete()
    gone = until(lambda: outcome(lambda: user.client.get(created.instance_name)), lambda seen: "raised" in seen)
    return {
        "name": deployment.friendly_name,
        "replicas": [status.replicas_ready, status.replicas_desired],
        "state": [status.state, status.phase],
        "lines": lines,
        "gone": gone["raised"],
    }


@story
def source_code_is_deployed_and_waited_for(user: User) -> Any:
    async def tell() -> list[tuple[str, str]]:
        env = {"PATH": user.torchrun_path}
        deploy = user.client.deploy_async
        text = deploy("source-text", source=SERVE, env={**env, "WHO": "text"}, timeout=30)

        def serve() -> None:
            import time

            print("serving as a function", flush=True)
            time.sleep(600)

        function = deploy("source-function", source=serve, env=env, timeout=30)
        deployments = await asyncio.gather(text, function)
        seen = [(d.state, until(d.logs, bool)) for d in deployments]
        for deployment in deployments:
            await deployment.delete_async()
        return seen

    return asyncio.run(tell())


@story
def a_plain_deployment_that_fails_says_so(user: User) -> Any:
    env = {"PATH": user.torchrun_path}
    deployed = outcome(lambda: user.client.deploy("plain-fails", source="raise SystemExit(4)", env=env, timeout=30))
    return {"deployed": deployed, "message": user.client.get_by_name("plain-fails").message}


@story
def an_image_alone_is_nothing_to_run(user: User) -> Any:
    return outcome(lambda: user.client.deploy("image-alone", image="nginx", timeout=5))


@story
def a_restart_gives_every_rank_a_fresh_start(user: User) -> Any:
    gate = user.gate("go")
    pids = user.directory
    script = f"echo $$ > '{pids}'/pid-$BASILICA_RANK-$$; echo started; {gate.wait}"
    training = user.shell("restarted", script)

    def started() -> list[str]:
        return sorted(path.name.split("-")[1] for path in Path(pids).glob("pid-*"))

    until(started, lambda seen: seen == ["0", "1"])
    answer = user.client.restart_deployment(training.name)
    afterwards = until(started, lambda seen: seen == ["0", "0", "1", "1"])
    training.wait_until_target_world(timeout=15)
    running = [(r.rank, r.phase, r.restarts) for r in training.ranks]
    gate.open()
    user.until_phase(training, "succeeded")
    user.until_settled(training)
    return {
        "answer": answer.instance_name == training.name,
        "started": afterwards,
        "running": running,
        "exits": user.exits(training),
        "ended": outcome(lambda: user.client.restart_deployment(training.name)),
    }
