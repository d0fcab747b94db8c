"""A stand-in for the client of the `modal` package: the classes that the executor uses, with calls as local processes.

Its signatures are compared with those of the real package in `test_modal.py`; its exceptions are the real ones.
"""

import pickle
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modal
from modal.types import InputInfo, InputStatus

from basilica.executors import LocalProcessExecutor, ModalSpawnExecutor
from basilica.executors.modal import run_replica
from basilica.executors.protocol import CANCELLED, ENDED, PENDING, SUCCEEDED, ReplicaHandle


def container(variables: dict[str, str], timeout: float) -> dict[str, Any]:
    """What Modal runs: the deployed function. To cancel a call raises an exception in it."""

    def cancelled(number: int, frame: object) -> None:
        raise modal.exception.InputCancellation

    signal.signal(signal.SIGTERM, cancelled)
    return run_replica(variables, timeout)


@dataclass
class Service:
    """Where calls run; it stands for Modal's servers, and is found by its directory from every process."""

    directory: Path

    @property
    def machines(self) -> LocalProcessExecutor:
        return LocalProcessExecutor(state_dir=self.directory / "machines", detach=True, grace_seconds=15)

    def spawn(self, variables: dict[str, str], timeout: float) -> str:
        arguments = {"variables": variables, "timeout": timeout}
        (handle,) = self.machines.launch_replicas(1, f"{__name__}:container", arguments)
        call_id = f"fc-{handle.metadata['job_name']}"
        (self.directory / call_id).write_bytes(pickle.dumps(handle))
        return call_id

    def handle(self, call_id: str) -> ReplicaHandle:
        try:
            found: ReplicaHandle = pickle.loads((self.directory / call_id).read_bytes())
        except FileNotFoundError:
            raise modal.exception.NotFoundError(f"no function call {call_id}") from None
        return found


@dataclass
class Entry:
    message: str


@dataclass
class Logs:
    call: "FunctionCall"

    def tail(self, entries: int = 100, *, source: Any = None) -> Iterator[Entry]:
        handle = self.call.service.handle(self.call.object_id)
        text = self.call.service.machines.stream_logs(handle, n_lines=entries)
        if not text.startswith("<rank"):
            yield Entry(text)


@dataclass
class FunctionCall:
    service: Service
    object_id: str

    @property
    def logs(self) -> Logs:
        return Logs(self)

    def get(self, timeout: float | None = None, *, index: int = 0) -> Any:
        handle = self.service.handle(self.object_id)
        (result,) = self.service.machines.collect([handle], timeout=timeout)
        if result["status"] not in ENDED:
            raise TimeoutError
        if result["status"] != SUCCEEDED:
            raise modal.exception.RemoteError(result["error"])
        return result["result"]

    def get_call_graph(self) -> list[InputInfo]:
        handle = self.service.handle(self.object_id)
        status = self.service.machines.poll(handle)
        stands = {SUCCEEDED: InputStatus.SUCCESS, CANCELLED: InputStatus.TERMINATED}.get(status, InputStatus.PENDING)
        task = "" if status == PENDING else "ta-1"
        own = InputInfo("in-1", self.object_id, task, stands, "replica", "app", [])
        return [InputInfo("in-0", "fc-parent", "ta-0", InputStatus.PENDING, "main", "app", [own])]

    def cancel(self, terminate_containers: bool = False) -> None:
        self.service.machines.cancel(self.service.handle(self.object_id))


@dataclass
class Function:
    service: Service
    options: dict[str, Any]

    def with_options(self, **options: Any) -> "Function":
        return Function(self.service, options)

    def spawn(self, *args: Any, **kwargs: Any) -> FunctionCall:
        return FunctionCall(self.service, self.service.spawn(*args, **kwargs))


class StandIn:
    """What the executor sees as the package."""

    exception = modal.exception

    @dataclass
    class Functions:
        service: Service

        def from_name(self, app_name: str, name: str, *, environment_name: str | None = None) -> Function:
            return Function(self.service, {})

    @dataclass
    class FunctionCalls:
        service: Service

        def from_id(self, function_call_id: str, client: Any = None) -> FunctionCall:
            return FunctionCall(self.service, function_call_id)

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        service = Service(directory)
        self.Function, self.FunctionCall = self.Functions(service), self.FunctionCalls(service)


def make_executor(directory: Path) -> ModalSpawnExecutor:
    return ModalSpawnExecutor("diloco", "replica", modal_package=StandIn(directory / "modal"))
