"""The SDK against a real server with real processes, and the faults of an earlier client that it does not repeat."""

import asyncio
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

import basilica
from basilica.client import flows
from basilica.client.effects import Call, NoAnswer
from tests.client.lying_server import DROP, RawBody, Reply, lying, run_body, sequence
from tests.support.server import Server, serving

ONE = basilica.WorldSize(1, 1, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[basilica.BasilicaClient]:
    with basilica.BasilicaClient(server.url, server.key) as made:
        yield made


def deploy(client: basilica.BasilicaClient, command: Any, **options: Any) -> basilica.DistributedTraining:
    options = {"world_size": ONE, "gpu_count": 0, "grace_seconds": 1, "timeout": 30, **options}
    return client.deploy_distributed(options.pop("name", None), command=command, **options)


def fails() -> None:
    raise ArithmeticError("too odd")


class TestDeploying:
    def test_a_run_that_ended_before_anybody_looked_is_no_failure(self, client: basilica.BasilicaClient) -> None:
        training = deploy(client, "true")
        assert training.join(30).ready == 1
        assert [e.exit_code for e in training.rank_exits] == [0]

    def test_a_run_that_failed_at_once_is_kept_with_its_logs(self, client: basilica.BasilicaClient) -> None:
        training = deploy(client, "echo so sorry; exit 3")
        with pytest.raises(basilica.BelowMinimumWorld):
            training.join(30)
        assert (training.phase, training.culprit and training.culprit.exit_code) == ("failed", 3)
        assert training.logs(rank=0) == "so sorry\n"

    def test_metrics_of_a_live_run_count_up_to_the_moment_of_asking(self, client: basilica.BasilicaClient) -> None:
        training = deploy(client, "sleep 600")
        first, asked = training.metrics().rank_seconds, time.monotonic()
        time.sleep(0.5)
        passed = time.monotonic() - asked
        assert training.metrics().rank_seconds >= first + 0.9 * passed
        training.delete()

    def test_the_exception_of_a_function_is_told_with_the_failure(self, client: basilica.BasilicaClient) -> None:
        training = client.deploy_distributed(None, source=fails, world_size=basilica.WorldSize(1, 1, 1), gpu_count=0)
        with pytest.raises(basilica.BelowMinimumWorld, match="reason=Error ArithmeticError: too odd"):
            training.join(30)
        assert training.culprit is not None
        assert training.culprit.traceback.startswith("Traceback (most recent call last):\n")
        assert training.culprit.traceback.endswith("\nArithmeticError: too odd")
        assert [e.error for e in training.rank_exits] == ["ArithmeticError: too odd"]
        assert training.message.startswith("rank 0 exited with code 1 (ArithmeticError: too odd)")

    def test_a_deploy_that_times_out_keeps_the_run_and_hands_it_over(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(basilica.BelowMinimumWorld) as late:
            deploy(client, "true", gpu_models=["TPU-v9"], gpu_count=1, timeout=0.3)
        elsewhere = pickle.loads(pickle.dumps(late.value))  # as it comes out of a pool of processes
        training = elsewhere.training
        assert "TPU-v9" in training.why()
        training.cancel()
        training._client.close()

    def test_or_deletes_it_if_asked_to(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(basilica.BelowMinimumWorld) as late:
            deploy(client, "true", gpu_models=["TPU-v9"], gpu_count=1, timeout=0.3, cleanup_on_failure=True)
        with pytest.raises(basilica.DeploymentNotFound):
            late.value.training.refresh()

    def test_a_string_is_a_line_for_the_shell_and_a_list_runs_as_it_stands(
        self, client: basilica.BasilicaClient
    ) -> None:
        line = deploy(client, "echo $RANK $0")
        listed = deploy(client, ["bash", "-c", 'echo "${BASH_VERSION:+bash} $*"', "x", "a  b", "$RANK", "$HOME"])
        line.join(30)
        listed.join(30)
        assert line.logs(rank=0) == "0 --\n"
        assert listed.logs(rank=0) == "bash a  b 0 $HOME\n"

    def test_no_name_gets_a_readable_one(self, client: basilica.BasilicaClient) -> None:
        assert deploy(client, "true").friendly_name.count("-") == 2

    @pytest.mark.parametrize("name", ["Upper", "a/b", "a b", "ä", "", "x" * 60])
    def test_bad_names_are_refused_here(self, client: basilica.BasilicaClient, name: str) -> None:
        with pytest.raises(basilica.ValidationError) as refused:
            deploy(client, "true", name=name or "-")
        assert refused.value.field == "name"

    def test_a_live_name_is_taken(self, client: basilica.BasilicaClient) -> None:
        first = deploy(client, "sleep 60", name="taken")
        with pytest.raises(basilica.NameInUse):
            deploy(client, "true", name="taken")
        first.delete()

    def test_neither_or_both_of_source_and_command_are_refused(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(basilica.ValidationError, match="either"):
            client.deploy_distributed(world_size=ONE)
        with pytest.raises(basilica.ValidationError, match="either"):
            client.deploy_distributed(world_size=ONE, source="x = 1\n", command="true")

    def test_packages_for_a_shell_line_are_refused_and_not_dropped(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(basilica.ValidationError, match="pip_packages"):
            deploy(client, "true", pip_packages=["six"])

    def test_a_time_to_live_of_zero_is_none(self, client: basilica.BasilicaClient) -> None:
        assert deploy(client, "sleep 0.3", ttl_seconds=0).join(30).ready == 1

    def test_an_unknown_option_is_named(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(TypeError, match=r"deploy_distributed\(\).*gpus"):
            client.deploy_distributed(world_size=ONE, command="true", gpus=1)  # type: ignore[call-arg]

    def test_secrets_reach_the_ranks_and_are_shown_nowhere(self, client: basilica.BasilicaClient) -> None:
        training = deploy(client, 'echo "${#TOKEN} letters"', secrets={"TOKEN": "hush-hush-hush"})
        training.join(30)
        assert training.logs(rank=0) == "14 letters\n"
        told = [str(training.view.raw), str(training.events()), training.why(), repr(training)]
        assert not any("hush" in text for text in told)


class TestHandles:
    def test_a_run_is_found_again_from_anywhere(self, client: basilica.BasilicaClient) -> None:
        made = deploy(client, "sleep 60", name="findable", world_size=basilica.WorldSize(1, 2, 3))
        again = client.training("findable")
        assert again.name == made.name
        assert basilica.DistributedTraining(client, made.name).phase == "ready"
        assert again.scale(3).target == 3
        assert made.wait_until_target_world(30).ready == 3  # it did not ask for it
        assert "findable" in [run.name for run in client.list()]
        again.delete()
        with pytest.raises(basilica.DeploymentNotFound):
            client.training(made.name)

    def test_after_scaling_down_the_wait_ends_when_the_others_are_gone(self, client: basilica.BasilicaClient) -> None:
        training = deploy(client, "trap '' TERM; while :; do sleep 0.1; done", world_size=basilica.WorldSize(1, 3, 3))
        training.wait_until_target_world(30)
        training.scale(1)
        training.wait_until_target_world(30)
        assert [r.rank for r in training.ranks if r.phase == "Running"] == [0]
        training.delete()

    def test_leaving_the_block_cancels_and_keeps_the_record(self, client: basilica.BasilicaClient) -> None:
        with deploy(client, "sleep 60") as training:
            pass
        assert training.refresh().phase == "cancelled"

    def test_or_removes_it_if_asked_to(self, client: basilica.BasilicaClient) -> None:
        with deploy(client, "sleep 60", delete_on_exit=True) as training:
            pass
        with pytest.raises(basilica.DeploymentNotFound):
            training.refresh()

    def test_a_wait_that_fails_in_the_block_does_not_lose_the_run(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(basilica.BelowMinimumWorld), deploy(client, "exit 7") as training:
            training.join(30)
        assert [e.exit_code for e in training.refresh().rank_exits] == [7]

    def test_lines_come_live_and_with_their_rank(self, client: basilica.BasilicaClient) -> None:
        gate = "while [ ! -e $BASILICA_CHECKPOINT_DIR/go ]; do sleep 0.05; done"
        script = f"echo begin; {gate}; echo end"
        training = deploy(client, script, world_size=basilica.WorldSize(2, 2, 2))
        seen = []
        for rank, line in training.stream_logs():
            seen.append((rank, line))
            if sorted(seen) == [(0, "begin"), (1, "begin")]:
                opener = f"touch $BASILICA_CHECKPOINT_DIR/../../{training.name}/checkpoints/go"
                deploy(client, opener).join(30)
        assert sorted(seen) == [(0, "begin"), (0, "end"), (1, "begin"), (1, "end")]
        assert training.logs(rank=1, tail=1) == "end\n"
        assert sorted(training.logs(follow=True).splitlines()) == ["0| begin", "0| end", "1| begin", "1| end"]

    def test_logs_of_a_run_that_is_not_there_are_an_error_and_no_text(self, client: basilica.BasilicaClient) -> None:
        with pytest.raises(basilica.DeploymentNotFound):
            basilica.DistributedTraining(client, "nobody").logs()

    def test_once_more(self, client: basilica.BasilicaClient) -> None:
        first = deploy(client, "echo $GREETING", env={"GREETING": "hello"})
        first.join(30)
        second = first.rerun()
        second.join(30)
        assert second.name != first.name
        assert second.logs(rank=0) == "hello\n"

    def test_what_a_function_returned(self, client: basilica.BasilicaClient) -> None:
        def train(factor: int) -> dict[str, int]:
            import os

            return {"rank": int(os.environ["RANK"]) * factor}

        training = client.deploy_distributed(
            source=train, source_args=(10,), world_size=basilica.WorldSize(2, 2, 2), gpu_count=0
        )
        assert training.results(30) == {0: {"rank": 0}, 1: {"rank": 10}}

    def test_one_bad_result_hides_no_other(self, client: basilica.BasilicaClient) -> None:
        half = '[ $RANK = 1 ] && printf "{\\"half\\": " > "$BASILICA_RESULT_FILE" || echo 7 > "$BASILICA_RESULT_FILE"'
        training = client.deploy_distributed(command=half, world_size=basilica.WorldSize(2, 2, 2), gpu_count=0)
        found = training.results(30)
        assert found[0] == 7
        assert isinstance(found[1], basilica.DistributedError)
        assert str(found[1]) == "the result of rank 1 is no JSON"

    def test_all_of_it_awaited(self, server: Server) -> None:
        async def story() -> None:
            async with basilica.BasilicaClient(server.url, server.key) as client:
                training = await client.deploy_distributed_async(
                    command="echo up; sleep 60", world_size=basilica.WorldSize(1, 1, 2), gpu_count=0
                )
                async with training:
                    assert (await training.scale_async(2)).target == 2
                    assert (await training.wait_until_target_world_async(30)).ready == 2
                    assert "2 of 2" in await training.why_async()
                    assert (await training.metrics_async()).ready == 2
                    async for rank, line in training.stream_logs_async([1]):
                        assert (rank, line) == (1, "up")
                        break
                    assert "ScaleObserved" in [e.reason for e in await training.events_async()]
                assert (await training.refresh_async()).phase == "cancelled"
                assert training.friendly_name in [r.name for r in await client.list_async()]
                await training.delete_async()

        asyncio.run(story())

    def test_a_notebook_shows_a_table_without_foreign_markup(self, client: basilica.BasilicaClient) -> None:
        training = deploy(client, "sleep 60", name="shown")
        html = training._repr_html_()
        assert "<b>shown</b>" in html
        assert "running" in html
        training.delete()


class TestTrouble:
    def test_a_create_whose_answer_was_lost_makes_one_run(self, server: Server) -> None:
        """The first request reaches the server, and its answer is lost on the way back."""
        size = {"min": 1, "target": 1, "max": 1}
        flow = flows.create({"instanceName": "lossy", "distributed": {"worldSize": size, "command": "true"}}, "key-1")
        made: list[str] = []
        reply: Any = None
        with server.client() as real:
            while len(made) < 2:
                effect = flow.send(reply)
                if isinstance(effect, Call):
                    answer = real.request(effect.method, effect.path, json=effect.body, headers=dict(effect.headers))
                    made.append(answer.json()["instanceName"])
                    reply = NoAnswer("dropped", sent=True)
                else:
                    reply = time.monotonic()
        assert made[0] == made[1]

    def test_the_kinds_of_refusal_have_types(self, server: Server) -> None:
        with basilica.BasilicaClient(server.url, "wrong") as stranger, pytest.raises(basilica.AuthenticationError):
            stranger.list()

    def test_too_many_requests_say_when_to_come_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flows, "PATIENCE", 0.01)
        with lying(sequence((429, {}))) as server, basilica.BasilicaClient(server.url, "k") as client:
            with pytest.raises(basilica.RateLimitError) as limited:
                client.list()
            assert limited.value.retry_after == 1.0

    def test_an_answer_that_is_no_json_is_no_network_error(self) -> None:
        def text(method: str, path: str) -> Reply:
            return 200, RawBody(b"<html>a proxy's page</html>")

        refused = pytest.raises(basilica.ServerError, match="hardly a Basilica server")
        with lying(text) as server, basilica.BasilicaClient(server.url, "k") as client, refused:
            client.list()

    def test_a_listing_is_one_request(self) -> None:
        rows = [run_body() for _ in range(20)]
        with lying(sequence((200, {"deployments": rows, "total": 20}))) as server:
            with basilica.BasilicaClient(server.url, "k") as client:
                assert len(client.list()) == 20
            assert server.count("GET") == 1

    def test_names_are_escaped_in_addresses(self) -> None:
        with lying(sequence((404, {}))) as server, basilica.BasilicaClient(server.url, "k") as client:
            with pytest.raises(basilica.DeploymentNotFound):
                client.training("a/../b?c")
            assert server.asked == [("GET", "/deployments/a%2F..%2Fb%3Fc")]

    def test_a_stream_of_lines_goes_on_where_it_broke(self) -> None:
        """It broke in the middle of a chunk, whose lines come again; none is lost, and none is told twice."""
        one, two = {"rank": 0, "line": "one", "cursor": "0@0:4"}, {"rank": 0, "line": "two"}
        three = {"rank": 0, "line": "three", "cursor": "0@0:14"}
        broken = RawBody(b"".join(json.dumps(entry).encode() + b"\n" for entry in (one, two)), missing=100)
        rest = RawBody(b"".join(json.dumps(entry).encode() + b"\n" for entry in (two, three)))
        with lying(sequence(DROP, (200, broken), (200, rest))) as server:
            with basilica.BasilicaClient(server.url, "k") as client:
                lines = list(basilica.DistributedTraining(client, "run-1").stream_logs())
            assert lines == [(0, "one"), (0, "two"), (0, "three")]
            assert "since=0%400%3A4" in server.asked[2][1]

    @pytest.mark.parametrize("name", ["", ".", ".."])
    def test_a_name_that_is_none_reaches_no_other_address(self, name: str) -> None:
        with lying(sequence((200, run_body()))) as server, basilica.BasilicaClient(server.url, "k") as client:
            with pytest.raises(basilica.DeploymentNotFound):
                client.training(name)
            assert server.asked == []

    def test_errors_travel_between_processes(self) -> None:
        error = basilica.BelowMinimumWorld("run", "failed", 0, 2, 5.0)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
