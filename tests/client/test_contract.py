"""The promises of the SDK's contract that callers meet when something is unusual: silent and odd servers, copies."""

import copy
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import basilica
import basilica.exceptions
from basilica.client import flows
from basilica.client.effects import Answer, NoAnswer
from basilica.client.problems import error_of
from basilica.core import errors
from tests.client.lying_server import Reply, lying, run_body, sequence
from tests.client.test_waits import Waiter, call, handle, ok, quick

__all__ = ["call", "quick"]  # fixtures

OURS = {"generation": 1, "observedGeneration": 1, "version": 3}
OTHER_SHAPES = [
    [],
    [1],
    7,
    "text",
    None,
    {},
    {"instanceName": None, "distributed": []},
    {"instanceName": "run-1", "distributed": {"worldSize": {"ready": "two"}}},
    {"instanceName": "run-1", "distributed": {"worldSize": [1, 2]}},
    {"instanceName": "run-1", "distributed": {"ranks": [{"rank": "0"}]}},
    {"instanceName": "run-1", "distributed": {"rankExits": [{"exitCode": 0}]}},
    {"deployments": [1]},
    {"deployments": 1},
    {"events": [1], "series": [1], "results": [1], "why": [], "deleted": 1},
]


class TestSilence:
    """A server that accepts connections and says nothing, or too little, does not hold anybody past their time."""

    @pytest.mark.parametrize("wait", ["wait_until_min_world", "wait_until_target_world", "wait_until_complete", "join"])
    def test_a_wait_ends_at_its_time(self, call: Waiter, wait: str) -> None:
        with accepting(lambda connection: connection.recv(1)) as url:
            began = time.monotonic()
            with pytest.raises(basilica.NetworkError):
                call(handle(url), wait, 0.5)
        assert time.monotonic() - began < 0.5 + 2 * flows.LAST_POLL

    def test_a_watch_that_is_never_answered_ends_at_its_time(self, call: Waiter) -> None:
        def script(_method: str, path: str) -> Reply:
            if "/watch" in path:
                gone.wait()
            return ok("starting", ready=0, **OURS)

        gone = threading.Event()
        with lying(script) as server:
            began = time.monotonic()
            with pytest.raises(basilica.BelowMinimumWorld):
                call(handle(server.url), "wait_until_min_world", 0.5)
            took = time.monotonic() - began
            gone.set()
        assert took < 0.5 + 2 * flows.LAST_POLL

    @pytest.mark.parametrize("drip", [b"", b" "], ids=["nothing more", "a byte now and then"])
    def test_an_answer_that_never_ends_does_not_hold_a_wait(self, call: Waiter, drip: bytes) -> None:
        def answer(connection: socket.socket) -> None:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n{")
            while drip:
                connection.sendall(drip)
                time.sleep(0.05)
            connection.recv(1)

        with accepting(answer) as url:
            began = time.monotonic()
            with pytest.raises(basilica.NetworkError):
                call(handle(url), "join", 0.5)
        assert time.monotonic() - began < 0.5 + 2 * flows.LAST_POLL

    def test_an_answer_in_pieces_is_whole(self, call: Waiter) -> None:
        body = json.dumps(run_body("succeeded")).encode()

        def answer(connection: socket.socket) -> None:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
            for at in range(0, len(body), 100):
                connection.sendall(body[at : at + 100])
                time.sleep(0.002)

        with accepting(answer) as url:
            assert call(handle(url), "join", 5).ready == 2


class TestOddAnswers:
    @pytest.mark.parametrize("body", OTHER_SHAPES, ids=str)
    @pytest.mark.parametrize(
        "ask",
        [
            lambda client: client.training("run-1"),
            lambda client: client.list(),
            lambda client: client.prune(),
            lambda client: basilica.DistributedTraining(client, "run-1").join(0),
            lambda client: basilica.DistributedTraining(client, "run-1").events(),
            lambda client: basilica.DistributedTraining(client, "run-1").series(),
            lambda client: client._blocking.run(flows.results_so_far(flows.Remembered("run-1"))),
            lambda client: list(basilica.DistributedTraining(client, "run-1").execute(["true"])),
            lambda client: list(basilica.DistributedTraining(client, "run-1").stream_logs()),
        ],
        ids=["get", "list", "prune", "join", "events", "series", "results", "execute", "stream_logs"],
    )
    def test_json_of_another_shape_is_an_error_of_the_server(
        self, ask: Callable[[basilica.BasilicaClient], object], body: object
    ) -> None:
        with lying(sequence((200, body))) as server, basilica.BasilicaClient(server.url, "k") as client:
            with pytest.raises(basilica.ServerError, match="hardly a Basilica server") as odd:
                ask(client)
            assert odd.value.status == 200

    @pytest.mark.parametrize("details", [None, [], "x", 5, {}, {"requested": 1}])
    @pytest.mark.parametrize("code", ["WorldSizeOutOfBounds", "QuotaExceeded", "UDTerminalState", "WorldClosed", "x"])
    def test_an_error_without_its_facts_is_still_one_of_ours(self, code: str, details: object) -> None:
        body = {"error": {"code": code, "message": "no", "details": details}}
        error = error_of(Answer(409, {}, json.dumps(body).encode()), "run-1")
        assert isinstance(error, basilica.BasilicaError)

    @pytest.mark.parametrize("body", [{"error": [1]}, {"error": "x"}, {"error": None}, [], 3])
    def test_an_error_of_another_shape_is_told_by_its_status(self, body: object) -> None:
        assert isinstance(error_of(Answer(401, {}, json.dumps(body).encode())), basilica.AuthenticationError)


class TestInternalErrors:
    BAD = (500, {"error": {"code": "x", "message": "hiccup", "timestamp": "t", "retryable": False}})

    @pytest.mark.parametrize("wait", ["wait_until_min_world", "wait_until_target_world", "join"])
    def test_a_single_one_does_not_end_a_wait(self, call: Waiter, wait: str) -> None:
        replies = [ok("starting", ready=0), self.BAD, ok("starting", ready=0), self.BAD, ok("succeeded")]
        with lying(sequence(*replies)) as server:
            call(handle(server.url), wait, 5)

    def test_nor_does_it_end_a_watch(self) -> None:
        replies = [ok(**OURS), self.BAD, ok("succeeded", **(OURS | {"version": 4, "settled": True}))]
        with lying(sequence(*replies)) as server:
            training = handle(server.url)
            with training._client:
                views = [v for v in training.changes() if not isinstance(v, NoAnswer)]
        assert [view.phase for view in views] == ["ready", "succeeded"]

    def test_one_that_stays_is_told_with_the_servers_words(self, call: Waiter) -> None:
        with lying(sequence(ok("starting", ready=0), self.BAD)) as server:
            with pytest.raises(basilica.ServerError, match="hiccup"):
                call(handle(server.url), "join", 60)
            assert server.count("GET") == 1 + flows.READ_TRIES

    def test_what_changes_something_is_not_sent_twice(self, call: Waiter) -> None:
        with lying(lambda method, _: ok() if method == "GET" else self.BAD) as server:
            with pytest.raises(basilica.ServerError):
                call(handle(server.url), "scale", 3)
            assert server.count("POST") == 1


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
    def test_a_copy_keeps_what_was_asked_for(self, copied: Callable[[Any], Any]) -> None:
        with lying(sequence(ok(ready=2, target=2))) as server, basilica.BasilicaClient(server.url, "k") as client:
            training = basilica.DistributedTraining(client, "run-1", delete_on_exit=True)
            training.scale(4)
            again = copied(training)
            assert (again.name, again.delete_on_exit) == ("run-1", True)
            with again._client, pytest.raises(basilica.BelowMinimumWorld) as late:
                again.wait_until_target_world(0)
            assert late.value.required_min == 4


class TestPendingScale:
    @pytest.mark.parametrize("phase", ["failed", "cancelled"])
    def test_a_lost_run_reports_the_requested_target(self, call: Waiter, phase: str) -> None:
        """The status of a server without generations still has the old target when the run is lost."""
        with lying(sequence(ok(), ok(), ok(phase, ready=0, target=2))) as server:
            training = handle(server.url)
            call(training, "scale", 4)
            with pytest.raises(basilica.BelowMinimumWorld) as lost:
                call(training, "wait_until_target_world", 5)
            assert (lost.value.required_min, lost.value.target) == (4, 4)
            assert training._run.requested_target is None


class TestLeaving:
    @pytest.mark.parametrize("status", [404, 405, 501])
    def test_a_run_is_deleted_where_the_server_cannot_cancel(self, status: int) -> None:
        def script(method: str, path: str) -> Reply:
            return (status, {}) if path.endswith("/cancel") else ok()

        with lying(script) as server:
            enter_and_leave(server.url)
            assert [path for method, path in server.asked if method == "DELETE"] == ["/deployments/run-1?wait=30.0"]

    def test_a_run_is_kept_where_it_can(self) -> None:
        with lying(sequence(ok("cancelled"))) as server:
            enter_and_leave(server.url)
            assert server.asked == [("POST", "/deployments/run-1/cancel")]

    def test_a_refusal_deletes_nothing(self) -> None:
        with lying(sequence((403, {}))) as server:
            with pytest.raises(basilica.AuthorizationError):
                enter_and_leave(server.url)
            assert server.count("DELETE") == 0


class TestErrors:
    def test_a_lost_run_has_the_exits_of_its_ranks(self, call: Waiter) -> None:
        failed = ok("failed", ready=0, exits={0: 0, 1: 3})
        with lying(sequence(failed)) as server, pytest.raises(basilica.BelowMinimumWorld) as lost:
            call(handle(server.url), "join")
        exits = lost.value.rank_exits
        assert exits == (basilica.RankExit(0, 0, "Completed", 0), basilica.RankExit(1, 3, "Error", 0))
        assert all(isinstance(e, basilica.RankExit) for e in exits)

    @pytest.mark.parametrize("wait", ["wait_until_complete", "scale"])
    def test_a_run_that_has_ended_is_named(self, call: Waiter, wait: str) -> None:
        with (
            lying(sequence(ok("failed"))) as server,
            pytest.raises(basilica.UDTerminalState, match="run 'run'") as over,
        ):
            call(handle(server.url), wait, 2)
        assert over.value.name == "run"

    @pytest.mark.parametrize(
        ("wait", "goal"),
        [
            ("wait_until_min_world", "1 rank to be up"),
            ("wait_until_target_world", "3 ranks to be up"),
            ("wait_until_complete", "the run to complete"),
        ],
    )
    def test_a_time_out_says_what_was_waited_for_and_how_far_it_came(self, call: Waiter, wait: str, goal: str) -> None:
        text = f"UD 'run': waited 0.05 s for {goal}; phase 'starting', 0 ready of"
        starting = sequence(ok("starting", ready=0, target=3))
        with lying(starting) as server, pytest.raises(basilica.BelowMinimumWorld, match=text) as late:
            call(handle(server.url), wait, 0.05)
        assert str(late.value).endswith("target 3")

    def test_the_module_of_exceptions_has_all_that_the_package_exports(self) -> None:
        ours = {
            name
            for name in basilica.__all__
            if getattr(getattr(errors, name, None), "__module__", "") == errors.__name__
        }
        assert set(basilica.exceptions.__all__) == ours
        assert all(getattr(basilica.exceptions, name) is getattr(basilica, name) for name in ours)


def enter_and_leave(url: str) -> None:
    with basilica.BasilicaClient(url, "key") as client, basilica.DistributedTraining(client, "run-1"):
        pass


@contextmanager
def accepting(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server of raw sockets; each connection is given to `serve` in a thread of its own."""
    connections: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=quietly, args=(connection,), daemon=True).start()

    def quietly(connection: socket.socket) -> None:
        try:
            serve(connection)
            while connection.recv(65536):
                pass
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                connection.close()
