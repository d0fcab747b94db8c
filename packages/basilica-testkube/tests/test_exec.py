"""Commands in containers of the test cluster, asked for by the clients that people have."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kubernetes import client
from kubernetes.stream import stream

from basilica_testkube import KubeServer
from manifests import pod

SECONDS = 30.0
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
ALIVE = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done")
PODS = "/api/v1/namespaces/default/pods"

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.02)


def running(kube: KubeServer, name: str = "one", *command: str, **spec: Any) -> None:
    kube.create(pod(name, *(command or ALIVE), **spec))
    kube.wait_for(lambda: (kube.get("pods", name) or {}).get("status", {}).get("phase") == "Running" or None)


def is_alive(pid: int) -> bool:
    """False for one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- kubectl ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kubectl(machines: KubeServer, tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    config = machines.kubeconfig(tmp_path / "config")

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = ["kubectl", "--kubeconfig", str(config), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    return start


Kubectl = Callable[..., "subprocess.Popen[str]"]


def ended(process: "subprocess.Popen[str]", given: str = "") -> tuple[str, str, int]:
    with process:
        out, err = process.communicate(given, timeout=SECONDS)
    return out, err, process.returncode


@needs_kubectl
def test_kubectl_gets_both_streams_and_the_exit_code(machines: KubeServer, kubectl: Kubectl) -> None:
    container = {"name": "main", "image": "any", "command": list(ALIVE), "env": [{"name": "MINE", "value": "a b"}]}
    running(machines, containers=[container])
    out, err, code = ended(kubectl("exec", "one", "--", "sh", "-c", "echo $MINE; echo oh >&2; exit 3"))
    assert (out, code) == ("a b\n", 3)
    assert err == "oh\ncommand terminated with exit code 3\n"
    assert ended(kubectl("exec", "one", "--", "true")) == ("", "", 0)
    out, _, code = ended(kubectl("exec", "one", "--", "head", "-c", "3000000", "/dev/zero"))
    assert (len(out), code) == (3000000, 0)


@needs_kubectl
def test_kubectl_writes_to_the_command_and_closes_its_input(machines: KubeServer, kubectl: Kubectl) -> None:
    running(machines)
    text = "x" * 200_000
    assert ended(kubectl("exec", "-i", "one", "--", "wc", "-c"), text)[0].strip() == "200000"


@needs_kubectl
def test_kubectl_is_told_what_cannot_be_run(machines: KubeServer, kubectl: Kubectl) -> None:
    running(machines)
    _, err, code = ended(kubectl("exec", "one", "--", "no-such-program"))
    assert code == 1
    assert "error executing command in container" in err
    assert "no-such-program" in err
    _, err, code = ended(kubectl("exec", "one", "-c", "other", "--", "true"))
    assert code == 1
    assert "container other" in err
    _, err, code = ended(kubectl("exec", "two", "--", "true"))
    assert (code, err) == (1, 'Error from server (NotFound): pods "two" not found\n')


@needs_kubectl
def test_a_command_outlives_its_client_and_not_its_container(
    machines: KubeServer, kubectl: Kubectl, tmp_path: Path
) -> None:
    running(machines)
    script = f"echo $$; cat; touch {tmp_path}/alone; exec sleep 1000"
    asking = kubectl("exec", "-i", "one", "--", "sh", "-c", script)
    assert asking.stdout is not None
    pid = int(asking.stdout.readline())
    asking.send_signal(signal.SIGKILL)
    ended(asking)
    until((tmp_path / "alone").exists)
    assert is_alive(pid)
    httpx2.delete(f"{machines.url}{PODS}/one").raise_for_status()
    until(lambda: not is_alive(pid))


# ---- the official client, which speaks v4 ----------------------------------------------------------------------------


def test_the_official_client_gets_both_streams_and_the_exit_code(machines: KubeServer) -> None:
    running(machines)
    with machines.api_client() as api:
        ask = client.CoreV1Api(api).connect_get_namespaced_pod_exec
        command = ["sh", "-c", "read line; echo got $line; echo oh >&2; exit 7"]
        told = stream(
            ask, "one", "default", command=command, stdin=True, stdout=True, stderr=True, _preload_content=False
        )
        told.write_stdin("something\n")
        told.run_forever(timeout=SECONDS)
        assert (told.read_stdout(), told.read_stderr(), told.returncode) == ("got something\n", "oh\n", 7)
        told.sock.shutdown()


# ---- refusals --------------------------------------------------------------------------------------------------------


def upgrade(kube: KubeServer, name: str, query: str, protocols: str = V5) -> httpx2.Response:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    headers |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Protocol": protocols}
    return httpx2.get(f"{kube.url}{PODS}/{name}/exec?{query}", headers=headers)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("command=true&container=other", "container other is not valid for pod one"),
        ("stdout=1", "at least one command"),
        ("command=sh&tty=true", "no terminals"),
        ("command=sh&stdout=0", "at least 1 of stdin, stdout, stderr"),
    ],
)
def test_what_is_asked_wrongly_is_a_bad_request(machines: KubeServer, query: str, words: str) -> None:
    running(machines)
    answer = upgrade(machines, "one", query)
    assert answer.status_code == 400
    assert words in answer.json()["message"]


def test_who_does_not_upgrade_or_speaks_another_protocol_is_refused(machines: KubeServer) -> None:
    running(machines)
    plain = httpx2.post(f"{machines.url}{PODS}/one/exec?command=true&stdout=1")
    assert (plain.status_code, plain.json()["message"]) == (400, "Upgrade request required")
    assert upgrade(machines, "one", "command=true&stdout=1", "v9.channel.k8s.io").status_code == 403
    assert upgrade(machines, "two", "command=true&stdout=1").status_code == 404


def test_a_pod_without_a_node_has_no_commands(kube: KubeServer) -> None:
    kube.create(pod("one", nodeSelector={"no": "such-node"}))
    answer = upgrade(kube, "one", "command=true&stdout=1")
    assert (answer.status_code, answer.json()["message"]) == (400, "pod one does not have a host assigned")


def test_before_v5_the_kubelet_answers_for_itself(machines: KubeServer) -> None:
    machines.create(pod("one", "true"))
    machines.wait_for(lambda: (machines.get("pods", "one") or {})["status"].get("phase") == "Succeeded" or None)
    answer = upgrade(machines, "one", "command=true&stdout=1", V4)
    assert (answer.status_code, answer.text) == (500, 'unable to upgrade connection: container not found ("main")')


# ---- byte by byte ----------------------------------------------------------------------------------------------------


class Raw:
    """A connection as it is on the wire."""

    def __init__(self, kube: KubeServer, query: str, protocol: str = V5) -> None:
        self._socket = socket.create_connection(("127.0.0.1", httpx2.URL(kube.url).port or 0), timeout=SECONDS)
        self._file = self._socket.makefile("rb")
        lines = [f"GET {PODS}/one/exec?{query} HTTP/1.1", "Host: kube", "Connection: Upgrade", "Upgrade: websocket"]
        lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
        self._socket.sendall("\r\n".join([*lines, f"Sec-WebSocket-Protocol: {protocol}", "", ""]).encode())
        self.answer = ""
        while (line := self._file.readline().decode()) != "\r\n":
            self.answer += line

    def send(self, opcode: int, data: bytes, *, masked: bool = True) -> None:
        self._socket.sendall(bytes((0x80 | opcode, 0x80 * masked | len(data))) + bytes(4 * masked) + data)

    def receive(self) -> tuple[int, bytes]:
        first, second = self._file.read(2)
        size = second & 0x7F
        if size >= 126:
            layout = "!H" if size == 126 else "!Q"
            (size,) = struct.unpack(layout, self._file.read(struct.calcsize(layout)))
        return first & 0x0F, self._file.read(size)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def test_the_handshake_is_that_of_the_standard(machines: KubeServer) -> None:
    running(machines)
    raw = Raw(machines, "command=cat&stdin=1&stdout=1&stderr=1")
    assert raw.answer.startswith("HTTP/1.1 101 Switching Protocols\r\n")
    assert "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in raw.answer  # RFC 6455, 1.3
    assert f"Sec-WebSocket-Protocol: {V5}\r\n" in raw.answer
    assert raw.receive() == (2, b"\x01")
    raw.send(9, b"you?")
    assert raw.receive() == (10, b"you?")
    raw.send(2, b"\x00hello")
    assert raw.receive() == (2, b"\x01hello")
    raw.send(2, b"\xff\x00")  # v5: the end of the input
    opcode, status = raw.receive()
    assert (opcode, status[:1], json.loads(status[1:])["status"]) == (2, b"\x03", "Success")
    assert raw.receive() == (8, struct.pack("!H", 1000))
    raw.close()


def test_a_frame_that_is_not_masked_is_a_protocol_error(machines: KubeServer) -> None:
    running(machines)
    raw = Raw(machines, "command=cat&stdin=1&stdout=1", V4)
    assert raw.receive() == (2, b"\x01")
    raw.send(2, b"\x00hello", masked=False)
    assert raw.receive() == (8, struct.pack("!H", 1002))
    raw.close()


def test_the_input_of_a_command_ends_when_its_client_goes(machines: KubeServer, tmp_path: Path) -> None:
    running(machines)
    mark = tmp_path / "ended"
    raw = Raw(machines, f"command=sh&command=-c&command=echo+$$;cat;touch+{mark}&stdin=1&stdout=1")
    assert raw.receive() == (2, b"\x01")
    pid = int(raw.receive()[1][1:])
    raw.close()
    until(mark.exists)
    until(lambda: not is_alive(pid))


def test_what_is_left_running_ends_with_the_cluster(tmp_path: Path) -> None:
    with KubeServer() as kube:
        running(kube)
        raw = Raw(kube, "command=sh&command=-c&command=echo+$$;exec+sleep+1000&stdout=1")
        assert raw.receive() == (2, b"\x01")
        pid = int(raw.receive()[1][1:])
    assert not os.path.exists(f"/proc/{pid}")
    raw.close()
