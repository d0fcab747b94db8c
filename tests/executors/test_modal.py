"""The Modal executor keeps the contract on a stand-in of the client, which has the signatures of the real one."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modal
import pytest
from modal._logs_manager import FunctionCallLogsManager
from modal.types import InputInfo, InputStatus

from basilica.executors import ModalSpawnExecutor, ReplicaHandle, ReplicaResult, ServerlessExecutor
from basilica.executors import modal as modal_executor
from basilica.testing.executor_contract import SECONDS, ExecutorContract
from tests.executors import modal_standin
from tests.executors.modal_standin import Service, StandIn, make_executor


class TestModalSpawnExecutor(ExecutorContract):
    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        return partial(make_executor, directory)


@pytest.mark.parametrize(
    ("real", "ours"),
    [
        (modal.Function.from_name, StandIn.Functions.from_name),
        (modal.FunctionCall.from_id, StandIn.FunctionCalls.from_id),
        (modal.FunctionCall.get, modal_standin.FunctionCall.get),  # type: ignore[misc]
        (modal.FunctionCall.cancel, modal_standin.FunctionCall.cancel),
        (modal.FunctionCall.get_call_graph, modal_standin.FunctionCall.get_call_graph),
        (FunctionCallLogsManager.tail, modal_standin.Logs.tail),
    ],
)
def test_the_stand_in_takes_what_the_real_one_takes(real: Any, ours: Any) -> None:
    known = inspect.signature(real).parameters
    mine = {name: parameter for name, parameter in inspect.signature(ours).parameters.items() if name != "self"}
    assert {name: known[name].kind for name in mine} == {name: parameter.kind for name, parameter in mine.items()}


def test_what_the_executor_uses_of_the_package_is_there() -> None:
    options = inspect.signature(modal.Function.with_options).parameters
    assert {"gpu", "timeout"} <= set(options)
    assert {field.name for field in dataclasses.fields(InputInfo)} >= {"function_call_id", "task_id", "status"}
    names = "NotFoundError OutputExpiredError InputCancellation RemoteError InternalFailure ExecutionError Error"
    assert all(hasattr(modal.exception, name) for name in [*names.split(), "FunctionTimeoutError"])
    assert not issubclass(modal.exception.OutputExpiredError, TimeoutError)  # what `get` raises while it waits
    assert "logs" in dir(modal.FunctionCall)


class Scripted:
    """A call that answers what it is told to."""

    def __init__(self, answer: Any, status: InputStatus = InputStatus.PENDING, task: str = "") -> None:
        self.answer, self.status, self.task = answer, status, task

    def get(self, timeout: float | None = None) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def get_call_graph(self) -> list[InputInfo]:
        return [InputInfo("in-1", "fc-1", self.task, self.status, "f", "m", [])]


def asked(call: Scripted) -> ReplicaResult:
    package = SimpleNamespace(
        exception=modal.exception, FunctionCall=SimpleNamespace(from_id=lambda call_id: call), Function=None
    )
    executor = ModalSpawnExecutor("app", modal_package=package)
    handle = ReplicaHandle(0, "modal", {"function_call_id": "fc-1", "job_name": "gang"})
    (result,) = executor.collect([handle], timeout=0)
    return result


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        (Scripted(TimeoutError()), "pending", "still pending"),
        (Scripted(TimeoutError(), task="ta-1"), "running", "still running"),
        (Scripted({"exit_code": 0, "result": 5}), "succeeded", None),
        (Scripted({"exit_code": 3, "error": "exited with code 3"}), "failed", "exited with code 3"),
        (Scripted(modal.exception.OutputExpiredError()), "failed", "nobody knows any more"),
        (Scripted(modal.exception.InputCancellation()), "cancelled", "cancelled"),
        (Scripted(modal.exception.RemoteError("x"), InputStatus.TERMINATED), "cancelled", "cancelled"),
        (Scripted(modal.exception.RemoteError("image pull"), InputStatus.INIT_FAILURE), "failed", "image pull"),
        (Scripted(modal.exception.FunctionTimeoutError("10 s")), "failed", "its time was up"),
        (Scripted(modal.exception.NotFoundError("gone")), "cancelled", "no such function call"),
    ],
)
def test_answers_of_modal(call: Scripted, status: str, said: str | None) -> None:
    result = asked(call)
    assert result["status"] == status
    assert result["error"] == said or (said or "?") in (result["error"] or "")


@pytest.mark.parametrize("trouble", [modal.exception.ConnectionError("down"), modal.exception.AuthError("token")])
def test_trouble_on_the_way_to_modal_is_raised_and_no_state(trouble: Exception) -> None:
    with pytest.raises(type(trouble)):
        asked(Scripted(trouble))


def test_if_one_call_cannot_be_spawned_the_others_are_cancelled(tmp_path: Path) -> None:
    executor = make_executor(tmp_path)
    spawn = Service.spawn
    spawned: list[str] = []

    def refuse(self: Service, *given: Any) -> str:
        if len(spawned) == 2:
            raise modal.exception.ResourceExhaustedError("no more")
        spawned.append(spawn(self, *given))
        return spawned[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Service, "spawn", refuse)
        with pytest.raises(modal.exception.ResourceExhaustedError):
            executor.launch_replicas(3, "basilica.testing.replicas:wait", {"directory": str(tmp_path)})
    handles = [ReplicaHandle(0, "modal", {"function_call_id": call, "job_name": "x"}) for call in spawned]
    assert {result["status"] for result in executor.collect(handles, timeout=SECONDS)} == {"cancelled"}


def test_more_calls_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_executor, "WAITS_AT_ONCE", 2)
    calls = {f"fc-{n}": Scripted(TimeoutError()) for n in range(5)}
    package = SimpleNamespace(exception=modal.exception, FunctionCall=SimpleNamespace(from_id=calls.__getitem__))
    executor = ModalSpawnExecutor("app", modal_package=package)
    handles = [ReplicaHandle(n, "modal", {"function_call_id": f"fc-{n}", "job_name": "x"}) for n in range(5)]

    def end(handle: ReplicaHandle, status: str) -> None:
        if handle.rank == 4:
            for number, call in enumerate(calls.values()):
                call.answer = {"exit_code": 0, "result": number}

    results = executor.collect(handles, timeout=SECONDS, on_change=end)
    assert [result["result"] for result in results] == [0, 1, 2, 3, 4]
