"""Object stores that are out for a while, slow, or do not answer at all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from basilica.diloco.effects import Range
from basilica.diloco.replica_entrypoint import store_result
from basilica.diloco.stores import cloud, open_store
from basilica.diloco.stores.answers import in_words, will_pass
from basilica.diloco.stores.cloud import CloudStore
from basilica.executors.results import read_results
from tests.diloco.gang import gang
from tests.diloco.relay import Relay
from tests.diloco.test_run import H, ends
from tests.diloco.test_stores import S3_SETTINGS, s3, s3_options

__all__ = ["s3"]  # a fixture is used by its name
SECONDS = 60.0
AT_ONCE = {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}}
"""obstore's own repetitions, of a few seconds, are left out."""


@pytest.fixture
def relay(s3: str) -> Iterator[Relay]:
    with Relay(s3) as relay:
        yield relay


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_a_run_goes_on_after_its_store_was_out(relay: Relay, s3: str, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = gang(
        2, lambda allreduce: ends(allreduce, 6 * H), "s3://bucket/never-out", store_options=s3_options(s3)
    )
    uri, options = "s3://bucket/out", s3_options(relay.url)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(gang, 2, lambda allreduce: ends(allreduce, 6 * H), uri, store_options=options)
        direct = open_store(uri, s3_options(s3))
        wait_until(lambda: bool(direct.list("run/log/")))
        relay.cut()
        wait_until(lambda: "does not answer" in caplog.text or run.done())
        relay.mend()
        assert run.result() == undisturbed
    assert relay.requests_cut


def test_a_store_that_has_never_answered_is_an_error_at_once(relay: Relay) -> None:
    relay.cut()
    store = open_store("s3://bucket/never", s3_options(relay.url) | AT_ONCE, patience=3600)
    with pytest.raises(ConnectionError, match=r"s3://bucket/never does not answer: .*error"):
        store.list("")


def test_a_store_that_stays_away_is_an_error_in_the_end(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "PAUSES", (0.01, 0.01))
    store = open_store("s3://bucket/away", s3_options(relay.url) | AT_ONCE, patience=0.1)
    assert store.list("") == ()
    relay.cut()
    with pytest.raises(ConnectionError, match="does not answer"):
        store.read(Range("a", 0, 1))


def test_an_upload_may_take_as_long_as_a_slow_link_needs(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "SHORTEST_UPLOAD", 0.5)
    relay.bytes_per_second = 1e6
    store = open_store("s3://bucket/slow", s3_options(relay.url))
    size = 2_000_000
    assert store.put_if_absent("large", size, iter([memoryview(bytes(size))]))
    read = store.read(Range("large", 0, size))
    assert read is not None
    assert len(read) == size


def test_the_largest_object_gets_hours_and_a_small_one_a_minute() -> None:
    store = CloudStore("s3://bucket/run", s3_options("http://127.0.0.1:1"))
    assert store._writer(100).client_options["timeout"] == "1m 4s"
    assert store._writer(cloud.LARGEST_CREATED).client_options["timeout"] == "18h 12m 16s"


def test_what_the_caller_says_of_timeouts_counts() -> None:
    given = s3_options("http://127.0.0.1:1")
    given["client_options"]["timeout"] = timedelta(seconds=7)
    assert CloudStore("s3://bucket/run", given)._writer(100).client_options["timeout"] == "7s"


def test_a_signal_is_handled_while_an_upload_hangs(relay: Relay) -> None:
    code = """
import signal
from basilica.diloco.stores import open_store
def end(*_):
    raise SystemExit(143)
signal.signal(signal.SIGTERM, end)
store = open_store("s3://bucket/hangs")
print("begins", flush=True)
store.put_if_absent("a", 1, iter([memoryview(b"1")]))
"""
    relay.hangs = True
    environment = {**os.environ, **S3_SETTINGS, "AWS_ENDPOINT_URL": relay.url}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        wait_until(lambda: bool(relay.connections))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SECONDS) == 143
        assert time.monotonic() - began < cloud.SHORTEST_UPLOAD / 2


def test_a_bucket_that_is_missing_is_named_at_once_however_patient(s3: str) -> None:
    store = open_store("s3://missing/run", s3_options(s3), patience=3600)
    with pytest.raises(ConnectionError, match=r"^s3://missing/run refuses: 404 Not Found: NoSuchBucket: [^:]*$"):
        store.list("")


@pytest.mark.parametrize(
    ("told", "words", "passes"),
    [
        (
            "HTTP error: error sending request\n\nDebug source",
            "does not answer: HTTP error: error sending request",
            True,
        ),
        ("status code: 503 Slow Down: <Code>SlowDown</Code>", "does not answer: status code: 503 Slow Down", True),
        ("status code: 429 Too Many Requests: x", "does not answer: status code: 429 Too Many Requests", True),
        ("PUT http://169.254.169.254/latest in 1s - status code: 403 Forbidden", "needs credentials", False),
        (
            "status code: 400 Bad Request: <Code>A</Code><Message>b c</Message>",
            "refuses: 400 Bad Request: A: b c",
            False,
        ),
        (
            "DeleteObjects request failed for key a/b: Access Denied (code: AccessDenied)",
            "refuses: DeleteObjects request failed for key a/b: Access Denied (code: AccessDenied)",
            False,
        ),
        (
            "DeleteObjects request failed for key a/b: Reduce your rate (code: SlowDown)",
            "does not answer: DeleteObjects request failed for key a/b: Reduce your rate (code: SlowDown)",
            True,
        ),
    ],
)
def test_what_a_store_says_is_understood(told: str, words: str, passes: bool) -> None:
    assert in_words(Exception(told)).startswith(words)
    assert will_pass(Exception(told)) is passes


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ftp://host/run' cannot be opened: .*Unable to recognise"):
        open_store("ftp://host/run").list("")


def test_a_result_is_stored_when_the_store_is_back(
    relay: Relay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**S3_SETTINGS, "AWS_ENDPOINT_URL": relay.url}.items():
        monkeypatch.setenv(name, value)
    environment = {"RENDEZVOUS_URI": "s3://bucket/result-after-outage", "REPLICA_JOB": "job"}
    open_store(environment["RENDEZVOUS_URI"]).list("")  # as the replica has done while it trained
    relay.cut()
    with ThreadPoolExecutor(1) as threads:
        stored = threads.submit(store_result, environment, 0, {"exit_code": 0, "result": 7})
        wait_until(lambda: "does not answer" in caplog.text or stored.done())
        relay.mend()
        stored.result(SECONDS)
    assert read_results(environment["RENDEZVOUS_URI"], "job", [0])[0]["result"] == 7


def test_without_obstore_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "obstore.store", raising=False)
    with pytest.raises(RuntimeError, match=r"s3://bucket/run needs obstore: pip install 'basilica-train\[diloco\]'"):
        open_store("s3://bucket/run").list("")
