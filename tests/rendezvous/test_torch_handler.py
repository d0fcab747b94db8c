"""torchrun's backend `basilica`: its client beside python-etcd's, and agents without python-etcd."""

import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import etcd
import pytest

from basilica.rank.inject import carry
from basilica.rendezvous import torch_handler
from basilica.rendezvous.torch_handler import ENTRY_POINT, Keys, NoRendezvous, _errors, group_rank
from tests.rendezvous.harness import free_port, service_process
from tests.support.python_etcd import without_python_etcd

ROOT = Path(__file__).parents[2]
RUNS = iter(range(1 << 30))


@pytest.fixture(params=["ours", "etcd"])
def address(request: pytest.FixtureRequest) -> tuple[str, int]:
    server = request.getfixturevalue(request.param)
    found: tuple[str, int] = server.address if request.param == "ours" else server
    return found


def keys(address: tuple[str, int]) -> Keys:
    return Keys(*address, _errors(etcd))


def shown(result: Any) -> dict[str, Any]:
    return {
        "key": result.key,
        "value": result.value,
        "dir": result.dir,
        "children": sorted(child.key for child in result.children if child.key != result.key),
    }


def bumped(client: Any, key: str) -> Any:
    found = client.get(key)
    found.value = "bumped"
    return client.update(found)


def bumped_too_late(client: Any, key: str) -> Any:
    found = client.get(key)
    client.set(key, "meanwhile")
    return client.update(found)


# Each call of torch's EtcdRendezvous and EtcdStore on the client, in an order in which each can be refused as well.
CALLS: list[Callable[[Any, str], Any]] = [
    lambda c, k: c.get(k),
    lambda c, k: c.write(key=k, value=None, dir=True, prevExist=False, ttl=None),
    lambda c, k: c.write(key=k, value=None, dir=True, prevExist=False, ttl=60),
    lambda c, k: c.refresh(k, ttl=60),
    lambda c, k: c.get(k),
    lambda c, k: c.write(key=k + "/value", value='{"a": "b&c=d+e"}', prevExist=False, ttl=60),
    lambda c, k: c.write(key=k + "/value", value="again", prevExist=False),
    lambda c, k: c.test_and_set(key=k + "/value", value="x", prev_value="y"),
    lambda c, k: c.test_and_set(key=k + "/value", value="é/✓", prev_value='{"a": "b&c=d+e"}', ttl=60),
    lambda c, k: c.get(key=k + "/value"),
    lambda c, k: bumped(c, k + "/value"),
    lambda c, k: bumped_too_late(c, k + "/value"),
    lambda c, k: c.set(k + "/empty", value=None, ttl=60),
    lambda c, k: c.set(key=k + "/kv/bWFuKzE=", value="MA=="),
    lambda c, k: c.set(key=k, value="a directory"),
    lambda c, k: c.get(key=k),
    lambda c, k: c.get(key=k + "/kv/"),
    lambda c, k: c.watch(k + "/value", index=1, timeout=0.2),
    lambda c, k: c.watch(key=k, index=1 << 40, timeout=0.2, recursive=True),
    lambda c, k: c.refresh(k + "/nothing", ttl=60),
    lambda c, k: c.delete(key=k + "/value", prevValue="other"),
    lambda c, k: c.delete(key=k + "/value", prevValue="meanwhile"),
    lambda c, k: c.delete(key=k + "/value", prevValue="meanwhile"),
]


# torch tells these apart.
CAUGHT = [
    etcd.EtcdKeyNotFound,
    etcd.EtcdAlreadyExist,
    etcd.EtcdCompareFailed,
    etcd.EtcdEventIndexCleared,
    etcd.EtcdWatchTimedOut,
    etcd.EtcdException,
]


def test_each_call_gives_what_python_etcd_gives(address: tuple[str, int]) -> None:
    def outcomes(client: Any, root: str) -> list[Any]:
        found: list[Any] = []
        for call in CALLS:
            try:
                found.append(shown(call(client, root)))
            except etcd.EtcdException as error:
                found.append(next(kind.__name__ for kind in CAUGHT if isinstance(error, kind)))
        return found

    number = next(RUNS)
    python_etcd = etcd.Client(*address)
    theirs = outcomes(python_etcd, f"/handler/theirs{number}")
    python_etcd.http.clear()
    ours = outcomes(keys(address), f"/handler/oursss{number}")
    assert [str(each).replace("oursss", "theirs") for each in ours] == [str(each) for each in theirs]
    refused = {each for each in ours if isinstance(each, str)}
    assert refused >= {"EtcdKeyNotFound", "EtcdAlreadyExist", "EtcdCompareFailed", "EtcdWatchTimedOut"}, ours


def test_a_watch_returns_with_the_change_and_leases_are_renewed_meanwhile(address: tuple[str, int]) -> None:
    client, root = keys(address), f"/handler/watch{next(RUNS)}"
    first = client.set(root + "/lease", None, ttl=60)
    changed: list[Any] = []
    watcher = threading.Thread(
        target=lambda: changed.append(client.watch(root, first.etcd_index + 1, timeout=30, recursive=True))
    )
    watcher.start()
    client.refresh(root + "/lease", ttl=60)  # wakes nobody
    client.set(root + "/value", "now")
    watcher.join(30)
    assert [found.value for found in changed] == ["now"]


def test_an_event_that_is_forgotten_is_refused_by_its_own_name(address: tuple[str, int]) -> None:
    client, root = keys(address), f"/handler/many{next(RUNS)}"
    first = client.set(root, "0")
    for number in range(1_010):  # a thousand are remembered
        client.set(root, str(number))
    with pytest.raises(etcd.EtcdEventIndexCleared):
        client.watch(root, first.etcd_index, timeout=10)


def test_a_rendezvous_that_comes_back_is_waited_for_and_a_write_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    client = keys(("127.0.0.1", port))
    with service_process(tmp_path / "data", "--port", str(port)):
        client.set("/a", "1")
    written: list[Any] = []
    writer = threading.Thread(target=lambda: written.append(client.set("/a", "2").value))
    writer.start()
    with service_process(tmp_path / "data", "--port", str(port)):
        writer.join(30)
        assert written == ["2"]

    monkeypatch.setattr(torch_handler, "BACK_WITHIN_S", 0.3)
    with pytest.raises(NoRendezvous, match=f"the rendezvous at 127.0.0.1:{port} did not answer"):
        client.get("/a")
    with pytest.raises(etcd.EtcdWatchTimedOut):  # whoever watches reads again, and waits there
        client.watch("/a", index=1, timeout=5)


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, int]]:
    """A server that gives each connection one answer and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join(30)


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nX-Etcd-Index: 7\r\n\r\n".encode() + body


FOUND = response(b'{"action": "get", "node": {"key": "/a", "value": "1"}}')


def test_a_connection_that_the_server_closed_meanwhile_costs_nothing() -> None:
    with answering(FOUND, FOUND) as address:
        client = keys(address)
        assert client.get("/a").etcd_index == 7
        (idle,) = client._idle
        assert idle.sock.recv(1, socket.MSG_PEEK) == b""  # it is closed now
        began = time.monotonic()
        assert client.get("/a").value == "1"
        assert time.monotonic() - began < torch_handler.ASK_AGAIN_S  # without a second try


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"<html>", b'{"node": 3}'])
def test_what_is_no_rendezvous_is_named(answer: bytes) -> None:
    with answering(response(answer)) as address, pytest.raises(etcd.EtcdException, match="is no rendezvous") as raised:
        keys(address).get("/a")
    assert f"what answers at 127.0.0.1:{address[1]} " in str(raised.value)


def test_the_entry_point_is_the_one_that_is_installed_and_carried(tmp_path: Path) -> None:
    group, name, value = ENTRY_POINT
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared == {group: {name: value}}
    carry(tmp_path)
    asked = "from importlib.metadata import entry_points as e; print([(p.name, p.value) for p in e(group='%s')])"
    line = [sys.executable, "-S", "-c", asked % group]
    env = {"PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str([(name, value)])


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        pytest.param(["0", "1", "2"], [0, 1, 2], id="as they came"),
        pytest.param(["2", "0", "1"], [2, 0, 1], id="in another order"),
        pytest.param(["10", "9", "4"], [2, 1, 0], id="some are not members: dense, by number and not by text"),
        pytest.param(["1", None, "0"], [0, 1, 2], id="one of torch's own backend"),
        pytest.param(["1", "1", "0"], [0, 1, 2], id="a rank twice"),
        pytest.param(["1", "01", "0"], [0, 1, 2], id="a rank twice in other digits"),
        pytest.param(["1", "x", "0"], [0, 1, 2], id="no number"),
        pytest.param(["1", "", "0"], [0, 1, 2], id="no text"),
        pytest.param(["-1", "2", "0"], [0, 1, 2], id="below zero"),
    ],
)
def test_agents_are_numbered_by_their_ranks_or_all_as_torch_does(ranks: list[str | None], numbers: list[int]) -> None:
    assert [group_rank(seat, ranks) for seat in range(len(ranks))] == numbers


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["basilica", "etcd"])
def test_torchrun_meets_in_an_image_with_torch_and_our_entrypoint_alone(backend: str, tmp_path: Path) -> None:
    """By a command line of the user's own; `etcd` is what published clients say."""
    carry(tmp_path / "carried")
    env = os.environ | without_python_etcd(tmp_path / "without", tmp_path / "carried" / "lib")
    script = tmp_path / "train.py"
    script.write_text("import os; print('world', os.environ['WORLD_SIZE'], flush=True)\n")
    port = free_port()
    meeting = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=r", "--nnodes=2"]
    line = [sys.executable, "-m", "torch.distributed.run", *meeting, str(script)]
    with service_process(tmp_path / "data", "--port", str(port)):
        agents = [
            subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
        ]
        done = [agent.communicate(timeout=100) for agent in agents]
    assert [said for said, _ in done] == ["world 2\n", "world 2\n"], done


@pytest.mark.slow
def test_https_is_refused_with_what_to_do(tmp_path: Path) -> None:
    carry(tmp_path / "carried")
    env = os.environ | without_python_etcd(tmp_path / "without", tmp_path / "carried" / "lib")
    meeting = ["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=protocol=https"]
    line = [sys.executable, "-m", "torch.distributed.run", *meeting, "train.py"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "speaks plain HTTP: for https, install python-etcd" in done.stderr
