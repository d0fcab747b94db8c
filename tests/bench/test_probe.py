"""Two real processes measure the link between them; whatever the other end does, each ends with one clear line."""

import re
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from basilica.bench import meet
from basilica.bench.link import Deadline
from basilica.bench.meet import parse_address
from basilica.bench.probe import TOKEN
from basilica.bench.sweep import KIB, MIB, SIZES
from tests.bench.probes import HOST, Ends, dial, free_port, playing_rank_1, sockets_of, until
from tests.mesh.peers import Etcd

QUICK = ("--budget", "1.5")


@pytest.mark.parametrize("method", ["tcp", "gloo"])
def test_two_processes_measure_the_link_between_them(ends: Ends, method: str) -> None:
    first, second = ends.pair("--method", method, *QUICK)
    report = first.report()
    assert second.report() == report
    assert (report["method"], report["node_a"], report["node_b"]) == (method, "node-0", "node-1")
    sizes = [point["size"] for point in report["sweep"]]
    assert sizes == list(SIZES[: len(sizes)])
    assert len(sizes) >= 3
    assert all(point["repeats"] >= 5 and point["busbw_gbps"] > 0 for point in report["sweep"])
    p10, p50, p90 = report["busbw_gbps"]
    assert 0 < p10 <= p50 <= p90
    assert p50 == report["sweep"][-1]["busbw_gbps"]
    assert (report["latency_us_at_1mib"] is not None) == (MIB in sizes)
    assert first.said == "" or "Gloo" in first.said or "c10d" in first.said


def test_the_best_method_that_both_have_is_taken(ends: Ends) -> None:
    first = ends.probe(0, "--method", "auto", *QUICK)
    second = ends.probe(1, "--method", "tcp", *QUICK)
    assert first.report()["method"] == second.report()["method"] == "tcp"


def test_without_torch_it_is_tcp(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    first = ends.probe(0, *QUICK, env={"PYTHONPATH": str(tmp_path)})
    ends.probe(1, *QUICK)
    assert first.report()["method"] == "tcp"


def test_methods_that_have_nothing_in_common(ends: Ends) -> None:
    first = ends.probe(0, "--method", "gloo")
    second = ends.probe(1, "--method", "tcp")
    problem = first.problem()
    assert problem == "one probe can use gloo, the other tcp: nothing in common"
    assert second.problem() == f"the probe on node-0: {problem}"


def test_a_method_that_is_not_there_says_what_it_needs(ends: Ends) -> None:
    assert "nccl needs torch with nccl, and a GPU" in ends.probe(0, "--method", "nccl").problem()


def test_the_one_that_calls_may_come_first(ends: Ends) -> None:
    with socket.create_server((HOST, ends.port)) as proxy:
        second = ends.probe(1, "--method", "tcp", *QUICK)
        proxy.accept()[0].close()
    first = ends.probe(0, "--method", "tcp", *QUICK)
    assert first.report() == second.report()


# ---- the other end is missing, dies, or is somebody else -------------------------------------------------------------


def test_a_peer_that_does_not_come(ends: Ends) -> None:
    problem = ends.probe(0, "--method", "tcp", "--deadline", "0.5").problem()
    assert problem == "the other probe did not come within 0.5 s"


def test_a_peer_that_does_not_answer(ends: Ends) -> None:
    problem = ends.probe(1, "--method", "tcp", "--deadline", "1").problem()
    assert problem == f"no probe answers at {ends.address}: Connection refused (1 s)"


def test_a_name_that_nobody_has(ends: Ends) -> None:
    probe = ends.probe(1, "--rendezvous", f"{HOST}:{free_port()}", "--key", "k", "--method", "tcp", "--deadline", "1")
    assert "could not be found through the rendezvous" in probe.problem()


def test_garbage_at_the_port_is_turned_away(ends: Ends) -> None:
    first = ends.probe(0, "--method", "tcp", *QUICK)
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 100_000,
        b"basilica-bench/1\n\xff\xff\xff\xff",
    ):
        with dial(ends.port) as stranger, suppress(OSError):  # it is closed with some of the garbage unread
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    second = ends.probe(1, "--method", "tcp", *QUICK)
    assert first.report() == second.report()


def test_the_probe_of_another_run_is_turned_away(ends: Ends) -> None:
    first = ends.probe(0, "--method", "tcp", "--deadline", "3", env={TOKEN: "this run"})
    second = ends.probe(1, "--method", "tcp", "--deadline", "2", env={TOKEN: "another"})
    assert second.problem().startswith(f"no probe answers at {ends.address}: ")
    said = r"the other probe did not come within 3 s; \d+ others called, none of them a probe of this run"
    assert re.fullmatch(said, first.problem())


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64])
def test_something_else_answers(ends: Ends, answer: bytes) -> None:
    with socket.create_server((HOST, ends.port)) as listener:
        second = ends.probe(1, "--method", "tcp")
        sock, _ = listener.accept()
        with sock:
            sock.sendall(answer)
            assert second.problem() == f"what answers at {HOST} is no bench probe of this version"


def test_a_peer_that_dies_in_the_middle(ends: Ends) -> None:
    first = ends.probe(0, "--method", "tcp")
    with playing_rank_1(ends.port) as link:
        assert link.hear() == {"method": "tcp"}
        assert link.hear() == {"size": KIB, "repeats": 2}
    assert first.problem().startswith("the probe on test went away: ")


def test_a_peer_that_falls_silent_in_the_middle(ends: Ends) -> None:
    first = ends.probe(0, "--method", "tcp", "--deadline", "3")
    with playing_rank_1(ends.port) as link:
        link.hear()
        assert first.problem().startswith("nothing came from the probe on test for ")


def test_a_peer_that_talks_nonsense_in_the_middle(ends: Ends) -> None:
    listener = socket.create_server((HOST, ends.port))
    second = ends.probe(1, "--method", "tcp")

    def nonsense() -> None:
        link, _ = meet.welcome(listener, {"token": "", "node": "test", "methods": ["tcp"]}, Deadline(30))
        link.tell(method="tcp")
        link.exchange(memoryview(b"\x00\x00\x00\x02[]"), memoryview(b""))
        link.close()

    with listener:
        other = threading.Thread(target=nonsense)
        other.start()
        assert second.problem() == "the probe on test sent something that is no message of a bench probe"
        other.join()


@pytest.mark.parametrize("method", ["tcp", "gloo"])
def test_a_peer_that_is_killed(ends: Ends, method: str) -> None:
    first, second = ends.pair("--method", method, "--budget", "100", "--deadline", "20")
    connected = 1 if method == "tcp" else 3
    until(lambda: second.process.poll() is not None or sockets_of(second.process.pid) >= connected)
    assert second.process.poll() is None
    second.kill()
    assert first.problem()  # gloo that lost its peer while they met only finds out by its deadline


@pytest.mark.parametrize("method", ["tcp", "gloo"])
def test_a_peer_that_is_frozen_does_not_hold_the_other_past_its_deadline(ends: Ends, method: str) -> None:
    first, second = ends.pair("--method", method, "--budget", "100", "--deadline", "10")
    connected = 1 if method == "tcp" else 3
    until(lambda: second.process.poll() is not None or sockets_of(second.process.pid) >= connected)
    second.process.send_signal(signal.SIGSTOP)
    assert first.problem()
    second.process.send_signal(signal.SIGCONT)


# ---- through the rendezvous ------------------------------------------------------------------------------------------


@pytest.fixture
def etcd(tmp_path: Path) -> Etcd:
    return Etcd(tmp_path / "etcd", v2=True)


@pytest.mark.parametrize("first_to_come", [0, 1])
def test_they_meet_through_the_keys_of_the_runs_rendezvous(ends: Ends, etcd: Etcd, first_to_come: int) -> None:
    etcd.start()
    try:
        arguments = ("--rendezvous", etcd.endpoint, "--key", "run/with a slash", "--method", "tcp", *QUICK)
        probes = {first_to_come: ends.probe(first_to_come, *arguments)}
        if first_to_come == 1:
            etcd.until_watchers(1)
        probes[1 - first_to_come] = ends.probe(1 - first_to_come, *arguments)
        assert probes[0].report() == probes[1].report()
    finally:
        etcd.stop()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [("h:1", ("h", 1)), (":80", ("", 80)), ("[::1]:5", ("::1", 5)), ("a.b.c:65535", ("a.b.c", 65535))],
)
def test_addresses(text: str, meant: tuple[str, int]) -> None:
    assert parse_address(text) == meant


@pytest.mark.parametrize("text", ["", "h", "h:", "h:x", "h:65536", "h:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)
