"""Pods as processes: what they are given, what is told of them, and that nothing is left."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from basilica_testkube import IGNORES_SIGTERM, MESSAGE_FILE, PULL_FAILS, KubeServer, Timing
from manifests import config_map, job, pod

Json = dict[str, Any]


def ended(kube: KubeServer, name: str) -> Json:
    """The pod, once its phase says that it is over."""

    def look() -> Json | None:
        found = kube.get("pods", name)
        return found if found is not None and found["status"]["phase"] in ("Succeeded", "Failed") else None

    return kube.wait_for(look)


def running(kube: KubeServer, name: str) -> Json:
    def look() -> Json | None:
        found = kube.get("pods", name)
        return found if found is not None and found["status"]["phase"] == "Running" else None

    return kube.wait_for(look)


def terminated(found: Json, container: int = 0) -> Json:
    state: Json = found["status"]["containerStatuses"][container]["state"]
    return dict(state["terminated"])


def log(kube: KubeServer, name: str, **query: Any) -> httpx2.Response:
    return httpx2.get(f"{kube.url}/api/v1/namespaces/default/pods/{name}/log", params=query)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_in(path: Path) -> int:
    """What a shell wrote with `echo $$$$`: Kubernetes makes one dollar of two."""
    end = time.monotonic() + 20
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < end, f"nothing in {path}"
        time.sleep(0.01)
    return int(path.read_text())


def test_a_pod_runs_and_its_output_is_kept(machines: KubeServer) -> None:
    machines.create(pod("a", "sh", "-c", "echo one; echo two >&2; echo three; exit 3"))
    found = ended(machines, "a")
    assert found["status"]["phase"] == "Failed"
    assert (terminated(found)["exitCode"], terminated(found)["reason"]) == (3, "Error")
    assert log(machines, "a").text == "one\ntwo\nthree\n"
    assert log(machines, "a", tailLines=1).text == "three\n"


def test_variables_come_from_everywhere(machines: KubeServer) -> None:
    machines.create(config_map("settings", LEVEL="7", OTHER="o"))
    machines.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "data": {"token": "aHVzaA=="}})
    body = pod(
        "a", "sh", "-c", "echo $NAME $(PLAIN) $PLAIN-$MORE $LEVEL $P_OTHER $TOKEN $WHERE; echo $(UNKNOWN)", "$(PLAIN)"
    )
    body["metadata"]["labels"] = {"team": "red"}
    body["spec"]["containers"][0] |= {
        "envFrom": [{"configMapRef": {"name": "settings"}}, {"prefix": "P_", "configMapRef": {"name": "settings"}}],
        "env": [
            {"name": "PLAIN", "value": "x"},
            {"name": "MORE", "value": "$(PLAIN)y$$(PLAIN)"},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}},
            {"name": "WHERE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "key", "key": "token"}}},
        ],
        "command": ["sh", "-c", 'echo $NAME $(PLAIN) $MORE $LEVEL $P_OTHER $TOKEN $WHERE "$0"', "$(UNKNOWN)"],
    }
    machines.create(body)
    ended(machines, "a")
    assert log(machines, "a").text == "red x xy$(PLAIN) 7 o hush node-0 $(UNKNOWN)\n"


def test_a_missing_config_map_keeps_a_container_waiting_until_it_comes() -> None:
    with KubeServer(speed=20) as kube:
        body = pod("a", "sh", "-c", "echo $LEVEL")
        body["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": "late"}}]
        kube.create(body)

        def waits() -> bool:
            statuses = kube.get("pods", "a")["status"].get("containerStatuses") or []  # type: ignore[index]
            return any(s["state"].get("waiting", {}).get("reason") == "CreateContainerConfigError" for s in statuses)

        kube.wait_for(waits)
        assert log(kube, "a").status_code == 400
        kube.create(config_map("late", LEVEL="9"))
        ended(kube, "a")
        assert log(kube, "a").text == "9\n"


def test_the_command_of_an_image_and_the_home_of_a_container(tmp_path: Path) -> None:
    with KubeServer(images={"tool:1": ["sh", "-c"]}, env={"GIVEN": "to all"}) as kube:
        body = pod("a")
        body["spec"]["containers"] = [
            {"name": "main", "image": "tool:1", "args": ["pwd; echo $GIVEN"], "workingDir": str(tmp_path)}
        ]
        kube.create(body)
        ended(kube, "a")
        assert log(kube, "a").text == f"{tmp_path}\nto all\n"


def test_a_command_that_is_not_there_is_a_start_error(machines: KubeServer) -> None:
    machines.create(pod("a", "no-such-command"))
    end = terminated(ended(machines, "a"))
    assert (end["exitCode"], end["reason"]) == (128, "StartError")


def test_an_image_that_cannot_be_pulled_keeps_a_pod_pending(kube: KubeServer) -> None:
    body = pod("a")
    body["spec"]["containers"][0]["image"] = f"{PULL_FAILS}trainer:1"
    kube.create(body)

    def reason() -> str:
        statuses = kube.get("pods", "a")["status"].get("containerStatuses") or [{"state": {}}]  # type: ignore[index]
        return str(statuses[0]["state"].get("waiting", {}).get("reason"))

    kube.wait_for(lambda: reason() == "ErrImagePull")
    kube.advance(20)
    assert reason() == "ImagePullBackOff"
    assert kube.get("pods", "a")["status"]["phase"] == "Pending"  # type: ignore[index]


def test_init_containers_come_first_and_one_after_the_other(machines: KubeServer, tmp_path: Path) -> None:
    line = tmp_path / "line"
    body = pod("a", "sh", "-c", f"echo main >> {line}")
    body["spec"]["initContainers"] = [
        {"name": f"i{n}", "image": "any", "command": ["sh", "-c", f"sleep 0.1; echo i{n} >> {line}"]} for n in (1, 2)
    ]
    machines.create(body)
    assert ended(machines, "a")["status"]["phase"] == "Succeeded"
    assert line.read_text().split() == ["i1", "i2", "main"]


def test_a_failing_init_container_fails_the_pod(machines: KubeServer) -> None:
    body = pod("a", "echo", "never")
    body["spec"]["initContainers"] = [{"name": "first", "image": "any", "command": ["false"]}]
    machines.create(body)
    assert ended(machines, "a")["status"]["phase"] == "Failed"
    assert log(machines, "a", container="main").status_code == 400


def test_containers_restart_in_place_with_their_last_state(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script = f"echo try; test -e {flag} || {{ touch {flag}; exit 5; }}"
    with KubeServer(speed=50) as kube:
        kube.create(pod("a", "sh", "-c", script, restartPolicy="OnFailure"))
        status = ended(kube, "a")["status"]["containerStatuses"][0]
        assert status["restartCount"] == 1
        assert status["lastState"]["terminated"]["exitCode"] == 5
        assert log(kube, "a", previous="true").text == "try\n"


def test_logs_can_be_followed_to_the_end(machines: KubeServer, tmp_path: Path) -> None:
    go = tmp_path / "go"
    machines.create(pod("a", "sh", "-c", f"echo first; while ! test -e {go}; do sleep 0.02; done; echo last"))
    running(machines, "a")
    url = f"{machines.url}/api/v1/namespaces/default/pods/a/log?follow=true"
    with httpx2.stream("GET", url, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines) == "first"
        go.touch()
        assert list(lines) == ["last"]


@pytest.mark.parametrize(
    ("name", "query", "says"),
    [("a", {"container": "x"}, "not valid"), ("a", {"previous": "true"}, "previous terminated")],
)
def test_logs_that_are_not_there(machines: KubeServer, name: str, query: dict[str, str], says: str) -> None:
    machines.create(pod("a", "sleep", "100"))
    running(machines, "a")
    answer = log(machines, name, **query)
    assert answer.status_code == 400
    assert says in answer.json()["message"]
    assert log(machines, "nobody").status_code == 404


def test_a_deleted_pod_gets_sigterm_and_ends_in_its_own_way(machines: KubeServer, tmp_path: Path) -> None:
    note, ready = tmp_path / "note", tmp_path / "ready"
    script = f"""
import pathlib, signal, sys, time
def bye(*_):
    pathlib.Path({str(note)!r}).write_text("bye")
    sys.exit(7)
signal.signal(signal.SIGTERM, bye)
pathlib.Path({str(ready)!r}).touch()
time.sleep(100)
"""
    machines.create(pod("a", sys.executable, "-c", script))
    running(machines, "a")
    machines.wait_for(ready.exists)
    seen: list[Json] = []
    watcher = threading.Thread(target=_remember_states, args=(machines.url, seen))
    watcher.start()
    machines.wait_for(lambda: seen)
    httpx2.delete(f"{machines.url}/api/v1/namespaces/default/pods/a").raise_for_status()
    watcher.join(20)
    assert note.read_text() == "bye"
    last = seen[-1]["status"]
    assert (last["phase"], terminated(seen[-1])["exitCode"]) == ("Failed", 7)  # told before it was gone
    assert machines.get("pods", "a") is None


def _remember_states(url: str, seen: list[Json]) -> None:
    import json

    with httpx2.stream("GET", f"{url}/api/v1/namespaces/default/pods?watch=true", timeout=20) as response:
        for line in response.iter_lines():
            event = json.loads(line)
            seen.append(event["object"])
            if event["type"] == "DELETED":
                return


def test_a_pod_that_ignores_sigterm_is_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with KubeServer(speed=20) as kube:
        kube.create(pod("a", "sh", "-c", f"trap '' TERM; echo $$$$ > {ready}; while :; do sleep 0.05; done"))
        pid = pid_in(ready)
        httpx2.delete(f"{kube.url}/api/v1/namespaces/default/pods/a").raise_for_status()
        assert alive(pid)
        kube.wait_for(lambda: kube.get("pods", "a") is None)
        assert not alive(pid)


def test_an_oom_kill_is_told_as_such(machines: KubeServer) -> None:
    machines.create(pod("a", "sleep", "100"))
    running(machines, "a")
    machines.oom_kill("a")
    end = terminated(ended(machines, "a"))
    assert (end["exitCode"], end["reason"]) == (137, "OOMKilled")


@pytest.mark.parametrize("code", [0, 1])
def test_an_oom_kill_of_a_child_leaves_the_code_to_the_container(kube: KubeServer, code: int) -> None:
    kube.create(pod("a"))
    running(kube, "a")
    kube.end_container("a", code, oom=True)
    end = terminated(ended(kube, "a"))
    assert (end["exitCode"], end["reason"]) == (code, "OOMKilled")


def test_an_evicted_pod_stays_to_be_read(machines: KubeServer) -> None:
    machines.create(pod("a", "sleep", "100"))
    running(machines, "a")
    machines.evict("a")
    found = ended(machines, "a")
    assert (found["status"]["phase"], found["status"]["reason"]) == ("Failed", "Evicted")
    assert any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in found["status"]["conditions"])


def test_the_eviction_api_marks_a_disruption_and_deletes(kube: KubeServer) -> None:
    body = pod("a")
    body["metadata"]["annotations"] = {IGNORES_SIGTERM: ""}
    kube.create(body)
    running(kube, "a")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a"}}
    assert httpx2.post(f"{kube.url}/api/v1/namespaces/default/pods/a/eviction", json=eviction).status_code == 201
    found = kube.get("pods", "a")
    assert found is not None
    assert "deletionTimestamp" in found["metadata"]
    assert any(c["type"] == "DisruptionTarget" for c in found["status"]["conditions"])


def test_the_last_words_of_a_container(machines: KubeServer) -> None:
    body = pod("a", "sh", "-c", "echo because; exit 1")
    body["spec"]["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    machines.create(body)
    machines.create(pod("b", "sh", "-c", f"printf said > ${MESSAGE_FILE}"))
    assert terminated(ended(machines, "a"))["message"] == "because\n"
    assert terminated(ended(machines, "b"))["message"] == "said"


def test_a_slow_start_is_slow() -> None:
    with KubeServer(processes=False, start_delay=lambda _: 60.0) as kube:
        kube.create(pod("a"))
        kube.wait_for(lambda: kube.get("pods", "a")["spec"].get("nodeName"))  # type: ignore[index]
        assert kube.get("pods", "a")["status"]["phase"] == "Pending"  # type: ignore[index]
        kube.advance(61)
        assert kube.get("pods", "a")["status"]["phase"] == "Running"  # type: ignore[index]


def test_whatever_a_container_started_ends_with_it(machines: KubeServer, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    machines.create(
        pod(
            "a",
            "sh",
            "-c",
            f"setsid sh -c 'echo $$$$ > {hidden}; exec sleep 1000' & while ! test -s {hidden}; do sleep 0.02; done",
        )
    )
    pid = pid_in(hidden)
    ended(machines, "a")
    assert not alive(pid)


def test_nothing_outlives_the_server(tmp_path: Path) -> None:
    files = [tmp_path / str(n) for n in range(3)]
    with KubeServer() as kube:
        for n, file in enumerate(files):
            script = f"trap '' TERM; setsid sh -c 'echo $$$$ > {file}; exec sleep 1000' & exec sleep 1000"
            kube.create(pod(f"p{n}", "sh", "-c", script))
        pids = [pid_in(file) for file in files]
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)
    kube.close()  # a second time is fine


def test_a_process_that_was_killed_by_a_signal_says_which(machines: KubeServer, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    machines.create(pod("a", "sh", "-c", f"echo $$$$ > {file}; exec sleep 100"))
    os.kill(pid_in(file), signal.SIGSEGV)
    assert terminated(ended(machines, "a"))["exitCode"] == 139


def test_a_gang_of_processes_ends_with_its_first_failure(machines: KubeServer) -> None:
    script = "test $JOB_COMPLETION_INDEX = 2 && { sleep 0.3; echo I was it; exit 9; }; exec sleep 100"
    machines.create(job("gang", 4, "sh", "-c", script))

    def failed() -> bool:
        status = machines.get("jobs", "gang")["status"]  # type: ignore[index]
        return any(c["type"] == "Failed" for c in status.get("conditions", []))

    machines.wait_for(failed)
    (left,) = machines.pods("gang")
    assert terminated(left)["exitCode"] == 9
    assert log(machines, left["metadata"]["name"]).text == "I was it\n"


def test_four_thousand_pods_fit() -> None:
    with KubeServer(processes=False, timing=Timing(job_sync=0.2)) as kube:
        kube.create(job("gang", 4000))
        kube.wait_for(lambda: kube.get("jobs", "gang")["status"].get("ready") == 4000, timeout=60)  # type: ignore[index]
        kube.end_containers([found["metadata"]["name"] for found in kube.pods("gang")])
        kube.wait_for(lambda: kube.get("jobs", "gang")["status"].get("completionTime"), timeout=60)  # type: ignore[index]
        assert kube.get("jobs", "gang")["status"]["completedIndexes"] == "0-3999"  # type: ignore[index]
