"""What people do with an installation on a real cluster, by our SDK, our command line, and kubectl."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from basilica import WorldSize
from basilica.executors import EKSExecutor
from tests.cluster.installed import CONTROL, Installed, kubectl, operators_killed, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SMALL: dict[str, Any] = {"cpu": "50m", "memory": "128Mi", "gpu_count": 0}
MANAGED = "app.kubernetes.io/managed-by=basilica"  # the operator has no rights in namespaces without this label
STAY = ["python3", "-u", "-c", "import os, time; print('rank', os.environ['RANK'], 'up'); time.sleep(600)"]
HOG = """
import os, time
print("rank", os.environ["RANK"], "begins")
time.sleep(1)
hoard = bytearray(400 << 20) if os.environ["RANK"] == "1" else b""
time.sleep(600)
"""
REPORTS = """
import os, time
import basilica
print(open("words.txt").read())
for step in range(5):
    basilica.report(step=step, loss=1 / (step + 1))
while not os.path.exists("go"):
    time.sleep(0.1)
print("done")
"""
FAILS = """
import os, sys, time
print("attempt", os.environ["BASILICA_ATTEMPT"])
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""
REACHES = """
import json, os, socket

def reaches(where):
    try:
        socket.create_connection(where, timeout=5).close()
    except OSError:
        return False
    return True

print(json.dumps({name: reaches(where) for name, where in json.loads(os.environ["TARGETS"]).items()}))
"""


def test_a_run_comes_up_grows_shrinks_and_is_cancelled(here: Installed) -> None:
    with here.client() as client:
        run = client.deploy_distributed("story", command=STAY, world_size=WorldSize(2, 2, 4), **SMALL)
        assert run.wait_until_target_world().ready == 2
        for size in (4, 2):
            run.scale(size)
            assert run.wait_until_target_world().ready == size
        for rank in range(2):
            assert run.logs(rank=rank).splitlines()[-1] == f"rank {rank} up"
        run.cancel()
        run.refresh()
        assert run.phase == "cancelled"
        instance = run.name
        run.delete()
    until(lambda: not here.leftovers(instance), "nothing of it is left")


def test_a_run_that_is_made_by_hand_and_deleted_by_hand(here: Installed) -> None:
    kubectl("create", "namespace", here.namespace, check=False)
    kubectl("label", "namespace", here.namespace, MANAGED, "--overwrite")
    here.apply("by-hand", image=here.plain_image, command=STAY, world={"min": 2, "target": 2, "max": 4})
    here.until_phase("by-hand", "ready")
    kubectl("--namespace", here.namespace, "scale", "ud", "by-hand", "--replicas", "3")
    until(lambda: here.get("ud", "by-hand")["status"]["world"]["ready"] == 3, "three ranks are up")
    assert [line for line in here.cli("train", "logs", "by-hand", "--rank", "2").splitlines() if "rank 2 up" in line]
    kubectl("--namespace", here.namespace, "delete", "ud", "by-hand")
    until(lambda: not here.leftovers("by-hand"), "nothing of it is left")


def test_a_rank_that_is_killed_for_its_memory_is_named(here: Installed) -> None:
    with here.client() as client:
        run = client.deploy_distributed(
            "oom", image=here.plain_image, command=["python3", "-u", "-c", HOG], world_size=WorldSize(2, 2, 2), **SMALL
        )
        until(lambda: run.refresh().is_terminal, "it has ended")
        assert run.culprit is not None
        assert (run.phase, run.culprit.rank) == ("failed", 1)
        assert (run.culprit.exit_code, run.culprit.termination_reason) == (137, "OOMKilled")
        assert "rank 1 begins" in run.culprit.log_tail
        run.delete()


def test_a_rank_that_fails_three_times(here: Installed) -> None:
    with here.client() as client:
        run = client.deploy_distributed(
            "fails", command=["python3", "-u", "-c", FAILS], world_size=WorldSize(2, 2, 2), max_restarts=2, **SMALL
        )
        until(lambda: run.refresh().is_terminal, "it has ended")
        assert run.culprit is not None
        assert (run.culprit.rank, run.culprit.exit_code) == (1, 3)
        exits = {each.rank: each for each in run.rank_exits}
        assert exits[1].restart_count == 2
        assert 0 not in exits or exits[0].role == "stopped"  # it may not have begun yet
        assert [line for line in run.logs(rank=1).splitlines() if line.startswith("attempt")] == [
            f"attempt {number}" for number in range(3)
        ]
        run.delete()


def test_an_edit_of_a_run_that_has_ended_is_ignored_and_told(here: Installed) -> None:
    kubectl("create", "namespace", here.namespace, check=False)
    kubectl("label", "namespace", here.namespace, MANAGED, "--overwrite")
    here.apply("over", command=["true"], world={"min": 1, "target": 1, "max": 4})
    here.until_phase("over", "succeeded")
    patch = json.dumps({"spec": {"distributed": {"worldSize": {"target": 3}}}})
    kubectl("--namespace", here.namespace, "patch", "ud", "over", "--type", "merge", "-p", patch)

    def told() -> bool:
        events = here.get("events")["items"]
        return any(event["reason"] == "UDTerminalState" and event["type"] == "Warning" for event in events)

    until(told, "a Warning UDTerminalState")
    assert here.get("ud", "over")["status"]["phase"] == "succeeded"
    kubectl("--namespace", here.namespace, "delete", "ud", "over")


def test_what_a_function_returns_comes_back(here: Installed) -> None:
    def twice(number: int) -> int:
        import os  # a function is shipped alone

        return number * 2 + int(os.environ["RANK"])

    with here.client() as client:
        run = client.deploy_distributed(
            "function", source=twice, source_args=[20], image=here.image, world_size=WorldSize(2, 2, 2), **SMALL
        )
        assert run.results(timeout=120) == {0: 40, 1: 41}
        run.delete()


def test_a_directory_is_shipped_a_command_runs_beside_a_rank_and_reports_stay(here: Installed, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORTS)
    (tmp_path / "words.txt").write_text("from the directory")
    with here.client() as client:
        run = client.deploy_distributed(
            "shipped",
            command=["python3", "-u", "train.py"],
            workdir=tmp_path,
            image=here.plain_image,
            world_size=WorldSize(2, 2, 2),
            **SMALL,
        )
        told: list[tuple[str, str] | int] = list(run.execute(["sh", "-c", "echo $RANK; cat words.txt; exit 4"], rank=1))
        assert (
            "".join(text for text in (each[1] for each in told if not isinstance(each, int))) == "1\nfrom the directory"
        )
        assert told[-1] == 4
        list(run.execute(["touch", "go"], rank=0)), list(run.execute(["touch", "go"], rank=1))
        run.join(timeout=120)
        assert (run.phase, run.logs(rank=0).splitlines()) == ("succeeded", ["from the directory", "done"])
        [loss] = run.series("loss", rank=1)
        assert [point.step for point in loss.points] == list(range(5))
        run.delete()


def test_pods_that_others_delete_come_back_and_cost_no_restart(here: Installed) -> None:
    with here.client() as client:
        run = client.deploy_distributed("deleted", command=STAY, world_size=WorldSize(2, 2, 3), **SMALL)
        run.wait_until_target_world()
        before = {each.pod_name for each in run.refresh().ranks}
        here.delete_pods(run.name, "worker")
        until(lambda: not before & {each.pod_name for each in run.refresh().ranks}, "they have other pods")
        run.wait_until_target_world()
        here.delete_pods(run.name, "rendezvous")
        run.scale(3)
        assert run.wait_until_target_world().ready == 3
        assert [each.restarts for each in run.refresh().ranks] == [0, 0, 0]
        run.delete()


def test_a_rank_that_is_disrupted_again_and_again_comes_back_within_seconds(here: Installed) -> None:
    """Of a Job's index the fifth failure would be followed by a pause of minutes."""
    with here.client() as client:
        run = client.deploy_distributed("drained", command=STAY, world_size=WorldSize(1, 2, 2), **SMALL)
        run.wait_until_target_world()
        for _ in range(5):
            before = run.refresh().ranks[1].pod_name
            kubectl("--namespace", here.namespace, "delete", "pod", before, "--wait=false")
            until(lambda before=before: run.refresh().ranks[1].pod_name not in ("", before), "it has another pod", 30)  # type: ignore[misc]
            assert run.wait_until_target_world(timeout=30).ready == 2
        assert [each.restarts for each in run.refresh().ranks] == [0, 0]
        run.delete()


def test_a_namespace_goes_with_the_live_run_in_it(here: Installed) -> None:
    namespace = f"{here.namespace}-goes"
    kubectl("create", "namespace", namespace)
    kubectl("label", "namespace", namespace, MANAGED)
    size = {"min": 2, "target": 2, "max": 2}
    body = {
        "apiVersion": "basilica.dev/v1alpha1",
        "kind": "UserDeployment",
        "metadata": {"name": "live", "namespace": namespace},
        "spec": {"command": STAY, "resources": {"cpu": "50m", "memory": "128Mi"}, "distributed": {"worldSize": size}},
    }
    kubectl("apply", "-f", "-", given=json.dumps(body))
    phase = ("--namespace", namespace, "get", "ud", "live", "-o", "jsonpath={.status.phase}")
    until(lambda: kubectl(*phase) == "ready", "it is ready")
    kubectl("delete", "namespace", namespace, "--wait=false")
    until(lambda: not kubectl("get", "namespace", namespace, "--ignore-not-found"), "the namespace is gone", 90)


def test_the_executor_for_clusters(here: Installed) -> None:
    # Namespaces of users are held to the restricted standard, which an image of one's own need not meet.
    executor = EKSExecutor(here.image, namespace="default", cpu_request="100m", memory_request="128Mi")
    for entrypoint, config, status in (
        ("platform:node", {}, "succeeded"),
        ("os:listdir", {"path": "/not/there"}, "failed"),
    ):
        handles = executor.launch_replicas(3, entrypoint, config, timeout=120)
        results = executor.collect(handles)
        assert [result["status"] for result in results] == [status] * 3, results
        if status == "failed":
            assert "/not/there" in str([result["error"] for result in results])
        for handle in handles:
            executor.cancel(handle)


def test_pods_that_kubernetes_refuses_are_explained(here: Installed) -> None:
    quota = ("--namespace", here.namespace, "resourcequota", "tight")
    with here.client() as client:
        kubectl("create", "quota", "tight", "--namespace", here.namespace, "--hard=pods=2")  # rendezvous, and a rank
        run = client.deploy_distributed("tight", command=STAY, world_size=WorldSize(1, 3, 3), wait=False, **SMALL)
        until(lambda: "exceeded quota: tight" in run.why(), "it says what Kubernetes has against its pods")
        kubectl("delete", *quota)
        assert run.wait_until_target_world(timeout=240).ready == 3
        run.delete()
    # Users' namespaces are held to the restricted standard, which pods of executors do not promise to meet.
    executor = EKSExecutor(here.image, namespace=here.namespace, cpu_request="100m", memory_request="128Mi")
    handles = executor.launch_replicas(2, "platform:node", {}, timeout=20)
    results = executor.collect(handles)
    assert all("violates PodSecurity" in (result["error"] or "") for result in results), results
    executor.cancel(handles[0])


def test_a_network_probe_runs_beside_the_ranks(here: Installed) -> None:
    with here.client() as client:
        run = client.deploy_distributed("bench", command=STAY, world_size=WorldSize(2, 2, 2), bench=True, **SMALL)
        found = run.wait_until_bench_complete()
        assert found is not None
        assert run.bench is not None, found
        run.delete()


def test_ranks_reach_each_other_and_nothing_that_is_others(here: Installed) -> None:
    """Where the cluster's network plugin obeys network policies."""
    listen = "import socket, time; s = socket.create_server(('', 7777)); print('up'); time.sleep(600)"
    with here.client() as client:
        command = ["python3", "-u", "-c", listen]
        other = client.deploy_distributed("other", command=command, world_size=WorldSize(1, 1, 1), **SMALL)
        other.wait_until_target_world()
        address = {
            pod["metadata"]["labels"]["basilica.dev/role"]: pod["status"]["podIP"]
            for pod in here.get("pods")["items"]
            if pod["metadata"]["labels"].get("basilica.dev/instance") == other.name
        }
        targets = {
            "a rank of another run": (address["worker"], 7777),
            "another run's rendezvous": (address["rendezvous"], 2379),
        }
        asks = ["python3", "-u", "-c", REACHES]
        env = {"TARGETS": json.dumps(targets)}
        run = client.deploy_distributed("asks", command=asks, env=env, world_size=WorldSize(1, 1, 1), **SMALL)
        run.join()
        reached = {name for name, was in json.loads(run.logs(rank=0).splitlines()[-1]).items() if was}
        for each in (run, other):
            each.delete()
    if reached == set(targets):
        pytest.skip("no network policy is obeyed on this cluster")
    assert reached == set()


def test_nothing_is_lost_or_doubled_while_operators_are_killed(here: Installed) -> None:
    count = "import os, time; print('start of', os.environ['RANK'], os.environ['BASILICA_ATTEMPT']); time.sleep(20)"
    with here.client() as client:
        with operators_killed(every=(2.0, 6.0)) as killed:
            runs = [
                client.deploy_distributed(
                    f"storm-{n}",
                    command=["python3", "-u", "-c", count],
                    world_size=WorldSize(1, 2, 3),
                    wait=False,
                    **SMALL,
                )
                for n in range(3)
            ]
            for run in runs:
                run.wait_until_min_world(timeout=240)
            runs[0].scale(3)
            runs[1].cancel()
            until(lambda: all(run.refresh().is_terminal for run in runs), "all have ended", within=240)
        assert killed
        assert [run.phase for run in runs] == ["succeeded", "cancelled", "succeeded"]
        for run, size in ((runs[0], 3), (runs[2], 2)):
            for rank in range(size):
                assert run.logs(rank=rank).splitlines() == [f"start of {rank} 0"]
        for run in runs:
            run.delete()
    ready = ("rollout", "status", "deployment/basilica-operator", "--timeout=120s")
    kubectl("--namespace", CONTROL, *ready)


def test_what_the_installation_leaves_behind_is_nothing(here: Installed) -> None:
    """The last story: no run, no pod, and no finalizer that would keep a namespace."""
    kubectl("--namespace", here.namespace, "delete", "ud", "--all")
    until(lambda: not here.get("pods")["items"], "no pod is left")
    done = subprocess.run(
        ["kubectl", "delete", "namespace", here.namespace], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
