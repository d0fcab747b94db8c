"""What every `ServerlessExecutor` promises, as a test class. Subclass it, say how to make yours, and run pytest:

class TestMyExecutor(ExecutorContract):
    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        return functools.partial(MyExecutor, state=directory)

The replicas of the suite (`basilica.testing.replicas`) meet the test in `directory`, which both must see. The rules
that executors share are there to be used: `basilica.executors.arguments`, `environment`, `launching`, `outcomes`.
"""

import functools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from basilica.executors.protocol import (
    CANCELLED,
    CULPRIT,
    ENDED,
    FAILED,
    PENDING,
    RUNNING,
    STATUSES,
    STOPPED,
    SUCCEEDED,
    ReplicaHandle,
    ServerlessExecutor,
    gather_logs,
)
from basilica.machine.places import start_of

SECONDS = 60.0
REPLICAS = "basilica.testing.replicas"
RESULT_KEYS = {"rank", "status", "exit_code", "error", "job_name", "result"}
T = TypeVar("T")


def until(look: Callable[[], T], seconds: float = SECONDS) -> T:
    """The first answer that is true; it fails when the time is up."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"did not come true within {seconds:g} s"
        time.sleep(0.02)
    return found


def elsewhere(make: Callable[[], ServerlessExecutor], method: str, *arguments: object, **options: object) -> Any:
    """Call a method of a new executor in another process."""
    code = (
        "import pickle, sys\n"
        "make, method, arguments, options = pickle.load(sys.stdin.buffer)\n"
        "answer = getattr(make(), method)(*arguments, **options)\n"
        "sys.stdout.buffer.write(pickle.dumps(answer))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((make, method, arguments, options)),
        capture_output=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)},
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


class ExecutorContract:
    """Launching, looking, logs, cancelling and collecting. The attributes say where backends may differ."""

    runs_callables = False  # a function may be given as the entrypoint
    passes_objects = False  # arguments that are no JSON reach the replicas
    sets_rank_env = False  # the argument `rank_env` names one more variable for the rank
    cancels_gang = False  # to cancel one replica ends all
    fails_together = False  # a replica that fails ends the others
    tells_running = True  # waiting for a place and running can be told apart
    tells_results = True  # `result` is what the entrypoint returned
    tells_exit_codes = True  # the replica's own code, not only "it failed"
    shares_machine = True  # replicas are processes of this machine, so that one can see whether they are gone
    arguments: dict[str, Any] = {}  # noqa: RUF012  that this backend needs besides the function's own

    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        """Makes an executor, in this process and in others: it must be picklable."""
        raise NotImplementedError

    @contextmanager
    def opened(self, directory: Path) -> Iterator[ServerlessExecutor]:
        """An executor for one test; what it started is gone afterwards."""
        executor = self.maker(directory)()
        handles: list[ReplicaHandle] = []
        launch = executor.launch_replicas

        @functools.wraps(launch)
        def remembering(*given: Any, **options: Any) -> list[ReplicaHandle]:
            launched = launch(*given, **options)
            handles.extend(launched)
            return launched

        executor.launch_replicas = remembering  # type: ignore[method-assign]
        try:
            yield executor
        finally:
            for handle in handles:
                executor.cancel(handle)
            executor.collect(handles, timeout=SECONDS)
            getattr(executor, "close", lambda: None)()

    def stranger(self, handle: ReplicaHandle) -> ReplicaHandle:
        """A handle of a replica that there never was."""
        metadata = {n: f"{v}-nobody" if isinstance(v, str) else v for n, v in handle.metadata.items()}
        return replace(handle, metadata=metadata)

    def launch(
        self, executor: ServerlessExecutor, size: int, function: str, *, timeout: float = SECONDS, **arguments: Any
    ) -> list[ReplicaHandle]:
        return executor.launch_replicas(
            size, f"{REPLICAS}:{function}", {**self.arguments, **arguments}, timeout=timeout
        )

    def launch_waiting(self, executor: ServerlessExecutor, size: int, directory: Path) -> list[ReplicaHandle]:
        """Replicas that are known to run, and wait at the gate."""
        handles = self.launch(executor, size, "wait", directory=str(directory))
        until(lambda: len(list(directory.glob("pid-*"))) == size)
        return handles

    # ---- the protocol --------------------------------------------------------------------------------------------

    def test_it_is_an_executor(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            assert isinstance(executor, ServerlessExecutor)
            assert executor.backend_name
            assert isinstance(executor.supports_inter_replica_network, bool)

    # ---- launch and collect --------------------------------------------------------------------------------------

    def test_a_gang_succeeds_and_is_collected_in_the_order_of_the_handles(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 3, "tell", steps=7)
            assert [handle.rank for handle in handles] == [0, 1, 2]
            assert {handle.backend_name for handle in handles} == {executor.backend_name}
            results = executor.collect([handles[2], handles[0], handles[1]], timeout=SECONDS)
            assert [result["rank"] for result in results] == [2, 0, 1]
            for result in results:
                assert set(result) == RESULT_KEYS
                assert (result["status"], result["exit_code"], result["error"]) == (SUCCEEDED, 0, None)
                assert result["job_name"]
                if self.tells_results:
                    assert result["result"]["rank"] == result["rank"]
            assert executor.collect(handles, timeout=SECONDS) == [results[1], results[2], results[0]]

    def test_a_replica_finds_its_rank_and_arguments(self, tmp_path: Path) -> None:
        if not self.tells_results:
            pytest.skip("this backend does not tell what the entrypoint returned")
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 2, "tell", steps=7, name="ü b", flag=True, things=[1, {"a": None}])
            for result in executor.collect(handles, timeout=SECONDS):
                told = result["result"]
                own = {name: value for name, value in told["arguments"].items() if name not in self.arguments}
                assert own == {"steps": 7, "name": "ü b", "flag": True, "things": [1, {"a": None}]}
                found = told["environment"]
                assert found["REPLICA_RANK"] == str(result["rank"])
                assert (found["WORLD_SIZE"], found["STEPS"], found["NAME"], found["FLAG"]) == ("2", "7", "ü b", "true")
                assert "THINGS" not in found  # no scalar

    def test_an_argument_that_is_no_json(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            if self.passes_objects:
                handles = self.launch(executor, 1, "tell_kind", thing=Path("/somewhere"))
                (result,) = executor.collect(handles, timeout=SECONDS)
                assert result["result"] == "PosixPath"
                return
            with pytest.warns(UserWarning, match=r"'place'.*is no JSON"):
                handles = self.launch(executor, 1, "tell", place=Path("/somewhere"), steps=1)
            (result,) = executor.collect(handles, timeout=SECONDS)
            assert result["status"] == SUCCEEDED
            if self.tells_results:
                assert "place" not in result["result"]["arguments"]

    def test_the_local_name_of_the_rank(self, tmp_path: Path) -> None:
        if not self.tells_results:
            pytest.skip("this backend does not tell what the entrypoint returned")
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 2, "tell_variable", variable="MY_RANK", rank_env="MY_RANK")
            found = [result["result"] for result in executor.collect(handles, timeout=SECONDS)]
            assert found == (["0", "1"] if self.sets_rank_env else [None, None])

    def test_a_function_as_the_entrypoint(self, tmp_path: Path) -> None:
        def double(x: int) -> list[int]:
            import os  # noqa: PLC0415  a function that is shipped imports what it needs itself

            return [2 * x, int(os.environ["REPLICA_RANK"])]

        with self.opened(tmp_path) as executor:
            if not self.runs_callables:
                with pytest.raises(ValueError, match=r"package\.module:function"):
                    executor.launch_replicas(1, double, {"x": 3})
                return
            handles = executor.launch_replicas(2, double, {**self.arguments, "x": 3}, timeout=SECONDS)
            results = executor.collect(handles, timeout=SECONDS)
            assert [result["result"] for result in results] == [[6, 0], [6, 1]]

    def test_nobody_to_collect(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            assert executor.collect([], timeout=1) == []

    # ---- poll, logs and changes ----------------------------------------------------------------------------------

    def test_a_replica_goes_through_its_states(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 2, "wait", directory=str(tmp_path))
            seen = {executor.poll(handles[0])}
            until((tmp_path / "pid-0").exists)
            if self.tells_running:
                until(lambda: executor.poll(handles[0]) == RUNNING)
            assert seen <= {PENDING, RUNNING}
            (tmp_path / "gate").touch()
            until(lambda: executor.poll(handles[0]) == SUCCEEDED)
            executor.collect(handles, timeout=SECONDS)
            assert [executor.poll(handle) for handle in handles] == [SUCCEEDED, SUCCEEDED]

    def test_logs_before_during_and_after(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 2, "wait", directory=str(tmp_path))
            assert executor.stream_logs(handles[1])  # its lines, or something that stands for them
            until(lambda: "rank 1 waits" in executor.stream_logs(handles[1]))
            assert "goes on" not in executor.stream_logs(handles[1])
            (tmp_path / "gate").touch()
            executor.collect(handles, timeout=SECONDS)
            until(lambda: "rank 1 goes on" in executor.stream_logs(handles[1]))
            until(lambda: "rank 0 goes on" in executor.stream_logs(handles[0]))
            merged = gather_logs(executor, [handles[1], handles[0]]).splitlines()
            assert [line for line in merged if "waits" in line] == ["0| rank 0 waits", "1| rank 1 waits"]

    def test_only_the_last_lines(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "write_lines", lines=50)
            executor.collect(handles, timeout=SECONDS)
            until(lambda: "line 49" in executor.stream_logs(handles[0]))
            assert executor.stream_logs(handles[0], n_lines=2).splitlines() == ["line 48", "line 49"]

    def test_a_stranger_has_no_logs(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "tell")
            executor.collect(handles, timeout=SECONDS)
            text = executor.stream_logs(self.stranger(handles[0]))
            assert text.startswith("<rank 0: ")
            assert text.endswith(">")

    def test_changes_are_told_once_each(self, tmp_path: Path) -> None:
        told: list[tuple[int, str]] = []
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 2, tmp_path)

            def on_change(handle: ReplicaHandle, status: str) -> None:
                told.append((handle.rank, status))
                (tmp_path / "gate").touch()

            executor.collect(handles, timeout=SECONDS, on_change=on_change)
        for rank in (0, 1):
            mine = [status for r, status in told if r == rank]
            assert mine[-1] == SUCCEEDED
            assert len(mine) == len(set(mine))
            assert mine == sorted(mine, key=STATUSES.index)

    # ---- cancel --------------------------------------------------------------------------------------------------

    def test_cancel_ends_a_replica_and_may_be_repeated(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 2, tmp_path)
            pids = {rank: int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)}
            executor.cancel(handles[0])
            executor.cancel(handles[0])
            (result,) = executor.collect([handles[0]], timeout=SECONDS)
            assert (result["status"], result["exit_code"]) == (CANCELLED, None)
            assert executor.poll(handles[0]) == CANCELLED
            if self.shares_machine:
                until(lambda: start_of(pids[0]) is None)
            if not self.cancels_gang:
                assert executor.poll(handles[1]) == RUNNING or not self.tells_running
                executor.cancel(handles[1])
            until(lambda: executor.poll(handles[1]) == CANCELLED)
            if self.shares_machine:
                until(lambda: start_of(pids[1]) is None)
            executor.cancel(handles[0])
            assert executor.poll(handles[0]) == CANCELLED

    def test_cancel_after_the_end_changes_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "tell")
            before = executor.collect(handles, timeout=SECONDS)
            executor.cancel(handles[0])
            assert executor.poll(handles[0]) == SUCCEEDED
            assert executor.collect(handles, timeout=SECONDS) == before

    def test_cancel_of_a_strangers_handle_is_no_error(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 1, tmp_path)
            executor.cancel(self.stranger(handles[0]))
            assert executor.poll(handles[0]) not in ENDED
            (tmp_path / "gate").touch()
            assert executor.collect(handles, timeout=SECONDS)[0]["status"] == SUCCEEDED

    def test_cancel_of_a_handle_that_names_nobody_is_no_error(self, tmp_path: Path) -> None:
        """Whatever is missing in its metadata, and whoever made it."""
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 1, tmp_path)
            executor.cancel(ReplicaHandle(0, "elsewhere", {}))
            executor.cancel(ReplicaHandle(7, executor.backend_name, {}))
            executor.cancel(ReplicaHandle(7, executor.backend_name, dict.fromkeys(handles[0].metadata)))
            for left_out in handles[0].metadata:
                executor.cancel(self.incomplete(self.stranger(handles[0]), left_out))
            assert executor.poll(handles[0]) not in ENDED
            (tmp_path / "gate").touch()
            assert executor.collect(handles, timeout=SECONDS)[0]["status"] == SUCCEEDED

    def test_a_handle_that_names_nobody_is_a_clear_error_elsewhere(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            for use in (executor.poll, executor.stream_logs, lambda handle: executor.collect([handle], timeout=1)):
                with pytest.raises(ValueError, match=r"the handle of rank 7 has no '\w+' in its metadata"):
                    use(ReplicaHandle(7, executor.backend_name, {}))
                with pytest.raises(ValueError, match=r"a handle of 'elsewhere' was given to the executor"):
                    use(ReplicaHandle(7, "elsewhere", {}))

    def incomplete(self, handle: ReplicaHandle, left_out: str) -> ReplicaHandle:
        """The same without one of its metadata."""
        return replace(handle, metadata={name: value for name, value in handle.metadata.items() if name != left_out})

    def test_cancel_from_another_process_while_we_collect(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 1, tmp_path)
            with ThreadPoolExecutor(1) as threads:
                collecting = threads.submit(executor.collect, handles, timeout=SECONDS)
                elsewhere(self.maker(tmp_path), "cancel", handles[0])
                assert collecting.result()[0]["status"] == CANCELLED

    # ---- other processes -----------------------------------------------------------------------------------------

    def test_a_handle_works_in_another_process(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 2, tmp_path)
            assert pickle.loads(pickle.dumps(handles)) == handles
            make = self.maker(tmp_path)
            assert elsewhere(make, "poll", handles[1]) in {PENDING, RUNNING}
            until(lambda: "rank 1 waits" in elsewhere(make, "stream_logs", handles[1]))
            (tmp_path / "gate").touch()
            there = elsewhere(make, "collect", handles, timeout=SECONDS)
            assert there == executor.collect(handles, timeout=SECONDS)
            assert [result["status"] for result in there] == [SUCCEEDED, SUCCEEDED]

    # ---- deadlines -----------------------------------------------------------------------------------------------

    def test_collect_gives_up_at_its_deadline_and_the_gang_goes_on(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch_waiting(executor, 2, tmp_path)
            for result in executor.collect(handles, timeout=0.2):
                assert result["status"] in {PENDING, RUNNING}
                assert result["exit_code"] is None
                assert "after 0.2 s" in (result["error"] or "")
            assert executor.collect(handles[:1], timeout=0)[0]["status"] in {PENDING, RUNNING}
            (tmp_path / "gate").touch()
            assert {r["status"] for r in executor.collect(handles, timeout=SECONDS)} == {SUCCEEDED}

    def test_a_replica_is_stopped_when_its_time_is_up(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "wait", directory=str(tmp_path), timeout=2)
            (result,) = executor.collect(handles, timeout=SECONDS)
            assert result["status"] == FAILED
            assert result["exit_code"]
            assert result["error"]

    # ---- failures ------------------------------------------------------------------------------------------------

    def test_a_rank_that_fails(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 3, "leave_or_wait", culprit=1, code=3, directory=str(tmp_path))
            if not self.fails_together:
                until(lambda: executor.poll(handles[1]) == FAILED)
                (tmp_path / "gate").touch()
            results = executor.collect(handles, timeout=SECONDS)
            assert results[1]["status"] == FAILED
            assert results[1]["exit_code"] == 3 if self.tells_exit_codes else results[1]["exit_code"]
            assert results[1]["error"]
            assert results[1].get("role", CULPRIT) == CULPRIT
            assert "rank 1 leaves" in executor.stream_logs(handles[1])
            for other in (results[0], results[2]):
                if self.fails_together:
                    assert other["status"] in {FAILED, CANCELLED}
                    assert "rank 1" in (other["error"] or "")
                    assert other["status"] == CANCELLED or other.get("role") == STOPPED
                else:
                    assert (other["status"], other["exit_code"]) == (SUCCEEDED, 0)

    def test_what_a_rank_returned_is_kept_when_another_fails_later(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 2, "return_or_leave", culprit=1, code=3, directory=str(tmp_path))
            until(lambda: executor.poll(handles[0]) == SUCCEEDED)
            (tmp_path / "gate").touch()
            results = executor.collect(handles, timeout=SECONDS)
            assert (results[0]["status"], results[0]["exit_code"], results[0]["error"]) == (SUCCEEDED, 0, None)
            assert results[1]["status"] == FAILED
            if self.tells_results:
                assert results[0]["result"] == "rank 0 is done"

    def test_an_exception_is_told(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "break_down", culprit=0)
            (result,) = executor.collect(handles, timeout=SECONDS)
            assert (result["status"], result["exit_code"]) == (FAILED, 1)
            assert "the loss is not a number" in (result["error"] or "")
            until(lambda: "ValueError: the loss is not a number" in executor.stream_logs(handles[0]))

    def test_a_rank_that_is_killed(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "be_killed", culprit=0)
            (result,) = executor.collect(handles, timeout=SECONDS)
            assert result["status"] == FAILED
            assert result["exit_code"] == 137 if self.tells_exit_codes else result["exit_code"]
            error = result["error"] or ""
            assert "SIGKILL" in error or "137" in error
            assert result.get("role") in (None, CULPRIT)
            until(lambda: "rank 0 lives" in executor.stream_logs(handles[0]))

    def test_a_rank_that_dies_of_a_real_time_signal(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = self.launch(executor, 1, "be_killed", culprit=0, number=40)
            (result,) = executor.collect(handles, timeout=SECONDS)
            assert result["status"] == FAILED
            assert result["exit_code"] == 168 if self.tells_exit_codes else result["exit_code"]
            error = result["error"] or ""
            assert "signal 40" in error or "168" in error

    def test_an_entrypoint_that_is_not_there(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor:
            handles = executor.launch_replicas(1, "no_such_module_at_all:main", dict(self.arguments), timeout=SECONDS)
            (result,) = executor.collect(handles, timeout=SECONDS)
            assert (result["status"], result["exit_code"]) == (FAILED, 1)
            assert "no_such_module_at_all" in (result["error"] or "")

    # ---- bad arguments -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("problem", "wrong"),
        [
            pytest.param(problem, wrong, id=f"{next(iter(wrong))}={next(iter(wrong.values()))!r}")
            for problem, wrong in (
                (ValueError, {"n_replicas": 0}),
                (ValueError, {"n_replicas": -1}),
                (TypeError, {"n_replicas": 1.5}),
                (TypeError, {"n_replicas": True}),
                (ValueError, {"entrypoint": ""}),
                (ValueError, {"entrypoint": "not a module:main"}),
                (ValueError, {"entrypoint": "module:"}),
                (TypeError, {"entrypoint": 7}),
                (TypeError, {"entrypoint_args": [("steps", 1)]}),
                (ValueError, {"entrypoint_args": {"two words": 1}}),
                (ValueError, {"entrypoint_args": {"rank_env": "1=2"}}),
                (ValueError, {"timeout": 0}),
                (ValueError, {"timeout": float("nan")}),
                (TypeError, {"timeout": "soon"}),
            )
        ],
    )
    def test_bad_arguments(self, tmp_path: Path, problem: type[Exception], wrong: dict[str, Any]) -> None:
        given: dict[str, Any] = {"n_replicas": 1, "entrypoint": f"{REPLICAS}:tell", "entrypoint_args": {}, **wrong}
        with self.opened(tmp_path) as executor, pytest.raises(problem):
            executor.launch_replicas(**given)

    def test_a_deadline_that_is_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor, pytest.raises(ValueError, match="timeout"):
            executor.collect([], timeout=-1)

    @pytest.mark.parametrize("n_lines", [0, -1])
    def test_a_number_of_lines_that_is_none(self, tmp_path: Path, n_lines: int) -> None:
        with self.opened(tmp_path) as executor, pytest.raises(ValueError, match="n_lines"):
            executor.stream_logs(ReplicaHandle(0, executor.backend_name, {}), n_lines=n_lines)

    def test_a_handle_of_another_backend(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as executor, pytest.raises(ValueError, match="'elsewhere'"):
            executor.poll(ReplicaHandle(0, "elsewhere", {}))
