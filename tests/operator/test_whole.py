"""A whole installation as processes: the API, the operator and the ranks, which end at the worst moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

import basilica
from basilica.operator.election import NAME
from tests.operator.whole import Installation

pytestmark = pytest.mark.timeout(240)

Json = dict[str, Any]
Found = TypeVar("Found")
PATIENCE = 60.0
LEASE_SECONDS = 3.0  # short, since operators are killed here, and long enough for a machine that is busy
OURS = ("pods", "jobs", "services", "deployments", "networkpolicies", "secrets", "userdeployments")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("installation"), lease_seconds=LEASE_SECONDS)
    yield installation
    installation.close()


@pytest.fixture
def api(here: Installation) -> Iterator[httpx2.Client]:
    with client_of(here, here.url) as client:
        yield client


def client_of(here: Installation, url: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {here.key}"}, timeout=PATIENCE)


def deploy(api: httpx2.Client, name: str, command: str, *, target: int = 2, **distributed: Any) -> str:
    size = {"min": 1, "target": target, "max": 4}
    body = {"instanceName": name, "distributed": {"worldSize": size, "command": command, **distributed}}
    answer = api.post("/deployments", json=body)
    assert answer.status_code == 201, answer.text
    instance: str = answer.json()["instanceName"]
    return instance


def until(api: httpx2.Client, instance: str, done: Callable[[Json], object]) -> Json:
    """The first state that will do, told by the API's own long poll."""
    end = time.monotonic() + PATIENCE
    found: Json = api.get(f"/deployments/{instance}").json()
    while not done(found):
        assert time.monotonic() < end, f"nothing happened; the last state is {found}"
        answer = api.get(f"/deployments/{instance}/watch", params={"since": found["version"], "wait": 5})
        found = answer.json() if answer.status_code == 200 and answer.content else found
    return found


def ready(ranks: int) -> Callable[[Json], bool]:
    def is_ready(found: Json) -> bool:
        gang = found["distributed"]
        caught_up = gang["observedGeneration"] == gang["generation"]
        return bool(caught_up and gang["worldSize"]["ready"] == ranks == gang["worldSize"]["target"])

    return is_ready


def settled(found: Json) -> bool:
    return bool(found["distributed"]["settled"])


def left_of(here: Installation, instance: str) -> list[str]:
    found = [(kind, obj["metadata"]) for kind in OURS for obj in here.kube.objects(kind, "u-local")]
    return [f"{kind} {metadata['name']}" for kind, metadata in found if metadata["name"].startswith(instance)]


def eventually(look: Callable[[], Found | None]) -> Found:
    end = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.05)
    return found


def test_a_run_from_deploy_to_delete_leaves_nothing(here: Installation, api: httpx2.Client) -> None:
    instance = deploy(api, "whole", 'trap "exit 0" TERM; echo rank $RANK; sleep 1000 & wait')
    until(api, instance, ready(2))
    for target in (4, 2):
        assert api.post(f"/deployments/{instance}/scale-distributed", json={"target": target}).status_code == 200
        until(api, instance, ready(target))
    assert "1| rank 1" in api.get(f"/deployments/{instance}/logs").text
    reasons = [event["reason"] for event in api.get(f"/deployments/{instance}/events").json()["events"]]
    assert {"Created", "WorldReady", "ScaleRequested", "ScaleObserved"} <= set(reasons)
    assert api.delete(f"/deployments/{instance}").status_code == 200
    eventually(lambda: api.get(f"/deployments/{instance}").status_code == 404)
    eventually(lambda: left_of(here, instance) == [])
    usage = api.get("/usage").json()
    assert instance in str(usage)


def test_commands_run_beside_ranks_and_end_with_whoever_asked(here: Installation, api: httpx2.Client) -> None:
    instance = deploy(api, "beside", 'trap "exit 0" TERM; sleep 1000 & wait')
    until(api, instance, ready(2))
    command = ["-m", "basilica.cli.main", "train", "exec", instance, "--rank", "1", "--", "sh", "-c"]
    env = {**os.environ, "BASILICA_API_URL": here.url, "BASILICA_API_KEY": here.key}
    script = "echo $RANK of $WORLD_SIZE; echo oh >&2; exit 3"
    done = subprocess.run([sys.executable, *command, script], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("1 of 2\n", "oh\n", 3)
    with subprocess.Popen(
        [sys.executable, *command, "echo $$; exec sleep 1000"], env=env, stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        asking.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    refused = api.post(f"/deployments/{instance}/exec", json={"rank": 3, "command": ["true"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "Conflict")
    api.delete(f"/deployments/{instance}").raise_for_status()


def test_a_directory_is_shipped_and_what_its_ranks_report_is_drawn_after_the_end(
    here: Installation, tmp_path: Path
) -> None:
    """By the SDK and the command line, through one of two API servers each."""
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "lib" / "steps.py").write_text("STEPS = 40\n")
    (project / "train.py").write_text(
        "import os, basilica\nfrom lib.steps import STEPS\n"
        "for n in range(STEPS): basilica.report(step=n, loss=1 / (n + 1))\n"
        "print(sorted(os.listdir('.')), os.environ['RANK'])\n"
    )
    (project / ".gitignore").write_text("*.bin\n")
    (project / "large.bin").write_bytes(bytes(1000))
    with basilica.BasilicaClient(here.url, here.key) as client:
        training = client.deploy_distributed(
            "shipped",
            command=["python", "train.py"],
            workdir=project,
            world_size=basilica.WorldSize(2, 2, 2),
            gpu_count=0,
        )
        training.join(PATIENCE)
        assert training.logs(rank=1).splitlines()[-1] == "['.gitignore', 'lib', 'train.py'] 1"
        eventually(lambda: here.kube.get("services", f"{training.name}-rendezvous", "u-local") is None)
        found = training.series("loss")
        assert [(each.rank, len(each.points), each.points[-1].step) for each in found] == [(0, 40, 39), (1, 40, 39)]
        assert training.refresh().ranks[1].report is not None
        again = training.rerun()
        again.join(PATIENCE)
        other, url = here.start_server()
        env = {**os.environ, "BASILICA_API_URL": url, "BASILICA_API_TOKEN": here.key}
        command = [sys.executable, "-m", "basilica.cli.main", "train", "metrics", again.name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert "loss" in done.stdout
        other.terminate()
        for run in (training, again):
            run.delete()
    eventually(lambda: left_of(here, "shipped") == [])
    kept = [obj for obj in here.kube.objects("configmaps", "u-local") if "archive" in obj["metadata"]["name"]]
    assert len(kept) == 2, "an index and a part"
    for obj in kept:
        annotations = {"metadata": {"annotations": {"basilica.dev/wanted-at": "1000.0"}}}
        path = f"/api/v1/namespaces/u-local/configmaps/{obj['metadata']['name']}"
        patch = {"Content-Type": "application/merge-patch+json"}
        httpx2.patch(f"{here.kube.url}{path}", json=annotations, headers=patch).raise_for_status()
    here.operator.terminate()
    here.operator, here.health = here.start_operator()  # which looks for what is old when it begins to lead
    eventually(lambda: "archive" not in str(here.kube.objects("configmaps", "u-local")))


def test_a_rank_that_fails_three_times_is_named(here: Installation, api: httpx2.Client) -> None:
    script = 'if [ "$RANK" = 1 ]; then echo it broke >&2; exit 7; fi; sleep 1000'
    instance = deploy(api, "failing", script, worldSize={"min": 2, "target": 2, "max": 2}, maxRestarts=2)
    ended = until(api, instance, settled)
    assert ended["phase"] == "failed"
    culprit = ended["distributed"]["culprit"]
    assert (culprit["rank"], culprit["exitCode"]) == (1, 7)
    [bad] = [e for e in ended["distributed"]["rankExits"] if e["rank"] == 1]
    assert bad["restartCount"] == 2
    status = here.kube.get("userdeployments", instance, "u-local")
    assert status is not None
    assert status["status"]["culprit"]["rank"] == 1


def test_the_operator_is_killed_at_random_and_nothing_is_lost_or_doubled(
    here: Installation, api: httpx2.Client, tmp_path: Path
) -> None:
    """SIGKILL, again and again, while a run is scaled up and down and ends."""
    chance = random.Random(7)
    script = f'echo "$RANK $BASILICA_ATTEMPT" >>{tmp_path}/starts; until [ -e {tmp_path}/end ]; do sleep 0.1; done'
    instance = deploy(api, "killed", script)
    for target in (2, 4, 3, 4, 2):
        assert api.post(f"/deployments/{instance}/scale-distributed", json={"target": target}).status_code == 200
        time.sleep(chance.uniform(0.0, 1.5))
        replace_operator(here, signal.SIGKILL)
        until(api, instance, ready(target))
    (tmp_path / "end").touch()
    time.sleep(chance.uniform(0.0, 0.5))
    replace_operator(here, signal.SIGKILL)
    ended = until(api, instance, settled)
    assert ended["phase"] == "succeeded"
    assert [(e["rank"], e["exitCode"]) for e in ended["distributed"]["rankExits"]] == [(0, 0), (1, 0)]
    starts = (tmp_path / "starts").read_text().split("\n")[:-1]
    assert len(starts) == len(set(starts)), starts


def test_at_rest_nothing_is_asked_but_for_the_lease(here: Installation, api: httpx2.Client) -> None:
    """A run is up, a client waits for it, and nothing happens."""
    instance = deploy(api, "resting", "sleep 1000")
    until(api, instance, ready(2))
    eventually(lambda: here.kube.requests["create", "events"] and is_quiet(here))
    before = here.kube.requests.copy()
    version = api.get(f"/deployments/{instance}").json()["version"]
    api.get(f"/deployments/{instance}/watch", params={"since": version, "wait": 3})
    asked = here.kube.requests.since(before)
    assert asked.total == asked["patch", "leases"], asked
    assert api.post(f"/deployments/{instance}/cancel").status_code == 200
    until(api, instance, settled)


def is_quiet(here: Installation) -> bool:
    """For half a second nothing but the lease was asked for."""
    before = here.kube.requests.copy()
    time.sleep(0.5)
    asked = here.kube.requests.since(before)
    return asked.total == asked["patch", "leases"]


def test_an_operator_that_is_told_to_stop_gives_its_lease_back(here: Installation) -> None:
    def holder() -> str:
        lease = here.kube.get("leases", NAME)
        return str(lease["spec"]["holderIdentity"]) if lease else ""

    eventually(holder)
    first = here.operator
    first.terminate()
    assert first.wait(PATIENCE) == 0
    assert holder() == ""
    here.operator, here.health = here.start_operator()
    eventually(holder)


def test_of_two_operators_one_acts_and_both_are_healthy(here: Installation, api: httpx2.Client) -> None:
    second, health = here.start_operator()

    def leading(url: str) -> bool:
        return "basilica_operator_leads 1.0" in httpx2.get(f"{url}/metrics").text

    for url in (here.health, health):
        assert httpx2.get(f"{url}/healthz").text == "ok\n"
        eventually(lambda url=url: httpx2.get(f"{url}/readyz").status_code == 200)  # type: ignore[misc]
    assert (leading(here.health), leading(health)) == (True, False)
    instance = deploy(api, "two", "sleep 1000")
    until(api, instance, ready(2))
    here.operator.kill()
    here.operator.wait()
    eventually(lambda: leading(health))
    assert api.post(f"/deployments/{instance}/scale-distributed", json={"target": 3}).status_code == 200
    until(api, instance, ready(3))
    here.operator, here.health = second, health
    assert api.post(f"/deployments/{instance}/cancel").status_code == 200
    assert until(api, instance, settled)["phase"] == "cancelled"


def test_what_one_api_server_makes_another_one_knows(here: Installation, api: httpx2.Client) -> None:
    process, url = here.start_server()
    with client_of(here, url) as other:
        instance = deploy(api, "shared", "sleep 1000")
        assert other.get(f"/deployments/{instance}").status_code == 200
        refused = other.post(
            "/deployments",
            json={
                "instanceName": "shared",
                "distributed": {"worldSize": {"min": 1, "target": 1, "max": 1}, "command": "x"},
            },
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "NameInUse")
        until(other, instance, ready(2))
        assert other.post(f"/deployments/{instance}/cancel").status_code == 200
        assert until(api, instance, settled)["phase"] == "cancelled"
    process.terminate()
    assert process.wait(PATIENCE) == 0


def test_keys_are_revoked_everywhere_at_once(here: Installation) -> None:
    key = here.key_of("carol")
    headers = {"Authorization": f"Bearer {key}"}
    eventually(lambda: httpx2.get(f"{here.url}/deployments", headers=headers).status_code == 200)
    listed = here.basilica("keys", "list", "--store", "kubernetes", *here.cluster)
    [row] = [line for line in listed.splitlines() if " carol " in line]
    here.basilica("keys", "revoke", row.split()[0], "--store", "kubernetes", *here.cluster)
    eventually(lambda: httpx2.get(f"{here.url}/deployments", headers=headers).status_code == 401)
    secrets = [s for s in here.kube.objects("secrets", "default") if s["metadata"]["name"].startswith("basilica-key-")]
    assert key not in str(secrets)


def test_finalizers_are_released_when_there_is_no_operator(here: Installation, api: httpx2.Client) -> None:
    instance = deploy(api, "held", "sleep 1000")
    until(api, instance, ready(2))
    here.operator.terminate()
    assert here.operator.wait(PATIENCE) == 0
    said = here.basilica("operator", "--release", *here.cluster)
    assert f"userdeployment u-local/{instance}" in said
    assert f"pod u-local/{instance}-0" in said
    assert here.basilica("operator", "--release", *here.cluster) == ""
    gone = httpx2.delete(f"{here.kube.url}/apis/basilica.dev/v1alpha1/namespaces/u-local/userdeployments/{instance}")
    assert gone.status_code == 200
    eventually(lambda: left_of(here, instance) == [])
    here.operator, here.health = here.start_operator()


def replace_operator(here: Installation, sig: signal.Signals) -> None:
    here.operator.send_signal(sig)
    here.operator.wait()
    here.operator, here.health = here.start_operator()


def test_a_network_that_is_none_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    nobody = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "config").write_text(json.dumps(nobody))
    asked = ["--kubeconfig", str(tmp_path / "config"), "--egress", "internet", "--egress", "10.20.0.1/16"]
    command = [sys.executable, "-m", "basilica.cli.main", "operator", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("basilica: egress: names no network")


def test_an_operator_without_a_cluster_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "basilica.cli.main", "operator", "--kubeconfig", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("basilica: no cluster to talk to")
    assert "Traceback" not in done.stderr
