"""The objects of a run: what the API server takes without a word, least rights, and where ranks may run."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from basilica.core.deployment import Owner
from basilica.core.errors import ValidationError
from basilica.core.spec import DeploymentSpec, Exec, Gpus, ProviderFilter, Resources, Shell
from basilica.core.world import WorldSize
from basilica.kube.manifests.egress import networks
from basilica.kube.manifests.run import CARRIED_AT, RECORD_SECONDS, PodGroup, RunObjects, Settings
from basilica.wiring.kubernetes import ClusterOptions, run_settings_of
from basilica_testkube import KubeServer


def objects(settings: Settings | None = None, **spec: Any) -> RunObjects:
    wanted = {"program": Shell("echo $RANK"), **spec}
    return RunObjects(
        instance="train-0a1b2c3d",
        namespace="default",
        spec=DeploymentSpec(name="train", world=WorldSize(2, 4, 8), **wanted),
        owner=Owner("train", "6e1f"),
        settings=settings or Settings(image="basilica:1"),
    )


EVERYTHING = objects(
    Settings(image="basilica:1", queue="gold", checkpoints="shared", image_pull_secrets=("pull",)),
    secrets={"TOKEN": "hush"},
    env={"A": "$(B) $C"},
    image="mine:7",
    workdir="/app",
    resources=Resources(cpu=1.5, memory_bytes=1 << 30, gpus=Gpus(2, ("H100",), 80)),
    provider_filter=ProviderFilter(("acme",), ("other",)),
    topology_spread="region-aware",
)


@pytest.mark.parametrize(
    ("run", "parts"),
    [(objects(), 0), (EVERYTHING, 0), (objects(archive="ab" * 32), 0), (objects(archive="ab" * 32), 19)],
)
def test_a_strict_api_server_takes_all_of_it(run: RunObjects, parts: int) -> None:
    async def story() -> None:
        made = {
            **run.surroundings(),
            "rendezvous_service": run.rendezvous_service(),
            "kept": run.keep({"rank-0": b"1", "series": bytes(960 << 10)}, {"basilica.dev/results-too-large": "1"}),
        }
        where = {name: path.rpartition("/")[0] for name, path in run.paths().items()}
        made["pod"] = run.worker_pod(3, 1, "10.0.0.1:2379", archive_parts=parts, group=PodGroup("train", 4))
        made["probe"] = run.bench_pods(["a", "b"], "10.0.0.1:2379", strict=True)[1]
        where |= {"pod": run.pods_path, "probe": run.pods_path}
        async with httpx2.AsyncClient(base_url=kube.url) as client:
            for name, body in made.items():
                answer = await client.post(where[name], params={"fieldValidation": "Strict"}, content=json.dumps(body))
                assert answer.status_code == 201, (name, answer.text)
                assert answer.json()["metadata"]["ownerReferences"][0]["uid"] == "6e1f"

    with KubeServer(processes=False) as kube:
        asyncio.run(story())


def pod_of(run: RunObjects) -> dict[str, Any]:
    found: dict[str, Any] = run.worker_pod(0, 0, "10.0.0.1:2379")["spec"]
    return found


def test_containers_have_no_rights() -> None:
    deployment = objects().surroundings()["rendezvous"]["spec"]["template"]["spec"]
    for pod in (pod_of(objects()), deployment):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        [container] = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_command_reaches_the_rank_as_it_stands() -> None:
    [container] = pod_of(objects(program=Exec(("run", "$(HOME)", "$$"))))["containers"]
    assert container["command"][-3:] == ["run", "$$(HOME)", "$$$$"]


def test_what_decides_how_our_entrypoint_starts_is_given_to_the_rank_alone() -> None:
    [container] = pod_of(objects(env={"PATH": "/mine:$(HOME)", "MINE": "1"}))["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["MINE"] == "1"
    assert "PATH" not in env
    assert env["BASILICA_RANK_ENV"] == '{"PATH": "/mine:$$(HOME)"}'


def test_a_pod_has_time_for_a_notice_the_grace_and_the_record() -> None:
    pod = pod_of(objects(notice_seconds=45.5, grace_seconds=20.0, notice_signal="SIGUSR2"))
    assert pod["terminationGracePeriodSeconds"] == 66 + RECORD_SECONDS
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    names = ("BASILICA_NOTICE_SECONDS", "BASILICA_GRACE_SECONDS", "BASILICA_NOTICE_SIGNAL")
    assert [env[name] for name in names] == ["45.5", "20", "SIGUSR2"]
    assert "BASILICA_NOTICE_SIGNAL" not in json.dumps(pod_of(objects()))


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}


def test_snapshots_are_in_a_memory_volume_of_the_pod_which_has_half_of_its_memory() -> None:
    pod = pod_of(objects(resources=Resources(memory_bytes=1 << 30)))
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["snapshots"]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(1 << 29)}
    assert {"name": "snapshots", "mountPath": "/snapshots"} in pod["containers"][0]["volumeMounts"]
    assert variables(pod)["BASILICA_SNAPSHOT_DIR"] == "/snapshots"
    unlimited = {each["name"]: each for each in pod_of(objects())["volumes"]}
    assert unlimited["snapshots"]["emptyDir"] == {"medium": "Memory"}


def test_runs_that_share_a_claim_have_a_directory_each_and_can_be_resumed() -> None:
    names = ("BASILICA_CHECKPOINT_DIR", "BASILICA_RESUME_FROM", "BASILICA_RESUME_STEP", "BASILICA_CHECKPOINT_URI")
    resumed: dict[str, Any] = {"resume_from": "old-99887766@40", "checkpoint_uri": "s3://bucket/x"}
    shared = variables(pod_of(objects(Settings(image="basilica:1", checkpoints="shared"), **resumed)))
    assert [shared.get(name) for name in names] == [
        "/checkpoints/train-0a1b2c3d",
        "/checkpoints/old-99887766/snapshots",
        "40",
        "s3://bucket/x",
    ]
    alone = variables(pod_of(objects(**resumed)))
    assert [alone.get(name) for name in names] == ["/checkpoints", None, None, "s3://bucket/x"]
    assert [variables(pod_of(objects())).get(name) for name in names[1:]] == [None] * 3


@pytest.mark.parametrize(("length", "ending"), [(52, "-rendezvous"), (53, "-rdzv")])
def test_the_rendezvous_has_the_name_that_the_published_client_makes_up(length: int, ending: str) -> None:
    run = replace(objects(), instance="n" * length)
    assert run.rendezvous_service()["metadata"]["name"] == "n" * length + ending


def test_ranks_run_on_nodes_that_have_what_they_need() -> None:
    pod = pod_of(EVERYTHING)
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [[rule["key"] for rule in term["matchExpressions"]] for term in required["nodeSelectorTerms"]]
    provider = "basilica.dev/provider"
    assert keys == [
        ["basilica.dev/gpu-model", provider, provider, "nvidia.com/gpu.memory"],
        ["nvidia.com/gpu.product", provider, provider, "nvidia.com/gpu.memory"],
    ]
    assert pod["containers"][0]["resources"]["limits"] == {
        "cpu": "1500m",
        "memory": "1073741824",
        "nvidia.com/gpu": "2",
    }
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "topology.kubernetes.io/region"


def test_a_directory_that_was_sent_is_mounted_and_its_path_is_no_working_directory_of_the_image() -> None:
    pod = objects(archive="ab" * 32, workdir="sub").worker_pod(0, 0, "10.0.0.1:2379", archive_parts=3)["spec"]
    [container] = pod["containers"]
    assert "workingDir" not in container
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert (env["BASILICA_ARCHIVE"], env["BASILICA_ARCHIVE_PARTS"], env["BASILICA_ARCHIVE_WORKDIR"]) == (
        "ab" * 32,
        "3",
        "sub",
    )
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "archive"]
    maps = [source["configMap"] for source in volume["projected"]["sources"]]
    assert [each["items"][0]["path"] for each in maps] == ["0000", "0001", "0002"]
    assert all(each["optional"] for each in maps), "a pod that waits for a volume tells nobody"
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "archive"]
    assert mount["readOnly"]
    plain = objects(workdir="/app")
    assert pod_of(plain)["containers"][0]["workingDir"] == "/app"
    assert "ARCHIVE" not in json.dumps(pod_of(plain))


def test_a_queue_gets_the_gang_as_a_group_of_pods_that_look_alike_to_it() -> None:
    """Kueue makes a set of all pods of a group that have the same labels, and takes eight sets at most."""
    pods = [EVERYTHING.worker_pod(rank, 0, "10.0.0.1:2379", group=PodGroup("train", 9)) for rank in range(9)]
    assert len({json.dumps(pod["metadata"]["labels"], sort_keys=True) for pod in pods}) == 1
    assert pods[0]["metadata"]["labels"] == {
        **EVERYTHING.labels("worker"),
        "kueue.x-k8s.io/queue-name": "gold",
        "kueue.x-k8s.io/pod-group-name": "train",
    }
    assert {pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in pods} == {"9"}
    assert "kueue" not in json.dumps(objects().worker_pod(0, 0, "10.0.0.1:2379", group=PodGroup("train", 9)))


def test_a_rank_is_found_by_the_name_that_users_know_whichever_pod_it_has() -> None:
    for incarnation in (0, 7):
        pod = objects().worker_pod(3, incarnation, "10.0.0.1:2379")
        assert pod["metadata"]["name"] == f"train-0a1b2c3d-3-{incarnation}"
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("train-0a1b2c3d-3", "train-0a1b2c3d")
        env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert (env["BASILICA_RANK"], env["MASTER_ADDR"]) == ("3", "train-0a1b2c3d-0.train-0a1b2c3d")
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["metadata"]["annotations"] == {"basilica.dev/rank": "3"}


def test_ranks_speak_among_themselves_and_to_their_rendezvous() -> None:
    run = objects(Settings(image="basilica:1", egress=()))
    worker = run.surroundings()["worker_policy"]["spec"]
    assert worker["ingress"] == [{"from": [{"podSelector": {"matchLabels": run.labels("worker")}}]}]
    named = [rule for rule in worker["egress"] if "to" in rule]
    assert named == [{"to": [{"podSelector": {"matchLabels": run.labels(role)}} for role in ("worker", "rendezvous")]}]


def test_ranks_reach_the_internet_and_no_private_network_but_those_that_are_named() -> None:
    def outside(*egress: str) -> list[Any]:
        run = objects(Settings(image="basilica:1", egress=networks(egress)))
        rules = run.surroundings()["worker_policy"]["spec"]["egress"]
        return [to["ipBlock"] for rule in rules for to in rule.get("to", ()) if "ipBlock" in to]

    [internet] = outside("internet")
    assert internet["cidr"] == "0.0.0.0/0"
    assert {"10.0.0.0/8", "169.254.169.254/32"} < set(internet["except"])
    assert outside("internet", "10.20.0.0/16") == [internet, {"cidr": "10.20.0.0/16"}]
    assert outside("none") == []
    assert outside() == []
    assert outside("fd00::/8") == [{"cidr": "fd00::/8"}]


def test_what_the_operator_is_told_of_networks_reaches_the_manifests() -> None:
    options = ClusterOptions(egress=("10.20.0.0/16", "none"))
    assert run_settings_of(options, "home").egress == ("10.20.0.0/16",)


@pytest.mark.parametrize("told", ["", "intranet", "10.20.0.1/16", "10.20.0.0/33"])
def test_what_is_no_network_is_refused_with_an_example(told: str) -> None:
    with pytest.raises(ValidationError, match=r"say 10\.20\.0\.0/16"):
        networks((told,))


def test_another_image_is_given_our_entrypoint() -> None:
    pod = pod_of(objects(image="mine:7"))
    [carrier], [rank] = pod["initContainers"], pod["containers"]
    assert (carrier["image"], rank["image"]) == ("basilica:1", "mine:7")
    assert rank["command"][:2] == [f"{CARRIED_AT}/start", "--"]
    assert carrier["command"][-1] == CARRIED_AT
    [shared] = carrier["volumeMounts"]
    assert shared in rank["volumeMounts"]
    assert shared["name"] in [volume["name"] for volume in pod["volumes"]]
    assert carrier["securityContext"] == rank["securityContext"]


@pytest.mark.parametrize("image", ["", "basilica:1"])
def test_our_own_image_has_it(image: str) -> None:
    pod = pod_of(objects(image=image))
    assert "initContainers" not in pod
    assert pod["containers"][0]["command"][:3] == ["python", "-m", "basilica.entrypoint"]
