"""Commands beside ranks: run in the rank's container by its own entrypoint, which ends them when the client is gone."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import takewhile
from typing import Any, Literal

from basilica.core.errors import Conflict, RuntimeUnavailable
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.exec import STDERR, STDOUT, execute
from basilica.kube.manifests.run import WORKER_CONTAINER
from basilica.ports import Exited, Output, Run
from basilica.runtimes.kubernetes.parse import PodFacts
from basilica.runtimes.rules import COMMAND_RUNS

Json = dict[str, Any]
Streams = AsyncGenerator[tuple[int, bytes] | int, None]

START_WITHIN_S = 60.0
KILLED = 137
WORDS_MAX = 1000
_NAMES: dict[int, Literal["stdout", "stderr"]] = {STDOUT: "stdout", STDERR: "stderr"}
_ENDED = ("container not found", "pod does not exist", "CONTAINER_EXITED", "is not created or running")


async def execute_beside(
    api: KubeApi, run: Run, rank: int, pods: Sequence[PodFacts], argv: Sequence[str]
) -> AsyncGenerator[Output | Exited, None]:
    """Run a command and yield its output, then its exit code. `pods` are the rank's, oldest first."""
    label = f"rank {rank} of {run.instance}"
    pod = _running(label, pods)
    path = f"/api/v1/namespaces/{run.namespace}/pods/{pod.name}"
    decoders = {channel: codecs.getincrementaldecoder("utf-8")("replace") for channel in _NAMES}
    with _refusals(label):
        command = [*_entrypoint(await api.get(path)), "--beside", "--", *argv]
        async with aclosing(execute(api, path, WORKER_CONTAINER, command, stdin=True)) as streams:
            first = await _started(label, streams)
            yield Output("stdout", "")
            if text := decoders[STDOUT].decode(first):
                yield Output("stdout", text)
            async for found in streams:
                if isinstance(found, int):
                    break
                channel, data = found
                if text := decoders[channel].decode(data):
                    yield Output(_NAMES[channel], text)
            for channel, decoder in decoders.items():
                if text := decoder.decode(b"", final=True):
                    yield Output(_NAMES[channel], text)
            assert isinstance(found, int), "a command's streams end with its exit code or raise"
            yield Exited(found)


def _running(label: str, pods: Sequence[PodFacts]) -> PodFacts:
    if not pods:
        raise Conflict(f"{label} was never launched, or its pod is gone")
    newest = next((pod for pod in reversed(pods) if pod.state == "running"), None)
    if newest is None:
        last = pods[-1]
        state = "has ended" if last.over else "has not started yet"
        raise Conflict(f"{label} does not run: its pod {last.name} {state}, and commands need its container")
    return newest


def _entrypoint(pod: Json) -> list[str]:
    """Return the output before the rank's command in the pod itself: it may have been made with other settings than
    ours.
    """
    container = next(each for each in pod["spec"]["containers"] if each["name"] == WORKER_CONTAINER)
    return list(takewhile(lambda word: word != "--", container["command"]))


async def _started(label: str, streams: Streams) -> bytes:
    """Wait until the command has begun; return what it wrote to its standard output with that."""
    output, code = b"", 0
    try:
        async with asyncio.timeout(START_WITHIN_S):
            async for found in streams:
                if isinstance(found, int):
                    code = found
                    break
                channel, data = found
                if channel == STDOUT and data.startswith(COMMAND_RUNS) and not output:
                    return data.removeprefix(COMMAND_RUNS)
                output = (output + data)[:WORDS_MAX]
    except TimeoutError:
        raise RuntimeUnavailable(f"no command was started beside {label} within {START_WITHIN_S:g} s") from None
    if code == KILLED:
        raise Conflict(f"{label} does not run any more: its container was ended as the command began")
    answer = output.decode(errors="replace").strip() or "nothing"
    raise Conflict(f"no command can be run beside {label}: its image's entrypoint does not know how, and said {answer}")


@contextmanager
def _refusals(label: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status in (400, 404) or any(words in error.message for words in _ENDED):
            raise Conflict(f"{label} does not run any more: {error}") from error
        problem = f"the command beside {label}: {error}"
        if error.status == 403:
            problem += "; the control plane needs the right to `create` and `get` pods/exec: apply what "
            problem += "`basilica manifests` prints"
        raise RuntimeUnavailable(problem) from error
