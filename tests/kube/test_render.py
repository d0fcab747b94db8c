"""The manifests of gangs: as they were written down, valid for every Kubernetes we support, taken by the test server.

`python -m tests.kube.test_render` writes the golden files anew.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kubernetes_validate
import pytest

from basilica.executors.eks.executor import EKSExecutor
from basilica.kube.manifests.gang import COMPLETION_INDEX, Container, Gang, Placement, indexed_job
from basilica.kube.manifests.indexes import parse_indexes
from basilica_testkube import KubeServer

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.29", kubernetes_validate.latest_version())


class Taking:
    """A client that takes Jobs."""

    def __init__(self) -> None:
        self.jobs: list[Json] = []

    def create_namespaced_job(self, *, namespace: str, body: Json) -> None:
        assert body["metadata"]["namespace"] == namespace
        self.jobs.append(body)


def launched(
    size: int = 2,
    *,
    gpu: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    timeout: float = 3600,
    **settings: Any,
) -> Json:
    """What the executor sends for a gang."""
    batch = Taking()
    executor = EKSExecutor("registry.example/trainer:1", batch_api=batch, core_api=object(), **settings)
    with patch("secrets.token_hex", return_value="0badcafe"):
        executor.launch_replicas(size, "team.train:main", arguments or {}, gpu=gpu, timeout=timeout)
    (job,) = batch.jobs
    return job


def everything() -> Json:
    """A gang with all that a runtime may say."""
    container = Container(
        name="main",
        image="trainer:1",
        command=["python", "train.py"],
        env={"A": "1"},
        rank_env="RANK",
        requests={"cpu": "1"},
        limits={"nvidia.com/gpu": "8"},
        more={"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
    )
    owner = {"apiVersion": "basilica.dev/v1alpha1", "kind": "UserDeployment", "name": "run", "uid": "1-2-3"}
    return indexed_job(
        Gang(
            name="run",
            namespace="u-somebody",
            size=16,
            container=container,
            labels={"app": "basilica"},
            job_labels={"kueue.x-k8s.io/queue-name": "team"},
            pod_annotations={"note": "x"},
            pod_finalizers=["basilica.dev/evidence"],
            owner=owner,
            placement=Placement(node_selector={"gpu": "h100"}, tolerations=[{"operator": "Exists"}]),
            service_account_name="run",
            job={"backoffLimitPerIndex": 3, "suspend": True},
            pod={"subdomain": "run", "volumes": [{"name": "data", "emptyDir": {}}]},
        )
    )


CASES = {
    "plain": launched,
    "arguments": lambda: launched(3, arguments={"steps": 10, "lr": 0.5, "flag": True, "things": [1], "price": "$(5)"}),
    "gpu": lambda: launched(4, gpu="H100", timeout=90.5),
    "placed": lambda: launched(
        2,
        gpu="A100",
        run_id="llama",
        namespace="research",
        node_selector={"node.kubernetes.io/instance-type": "p4de.24xlarge", "zone": "a"},
        tolerations=[{"key": "team", "operator": "Equal", "value": "red", "effect": "NoSchedule"}],
        service_account_name="trainer",
        runtime_class_name="nvidia",
        command=["python", "own.py"],
        cpu_request="8",
        memory_request="64Gi",
        ttl_seconds_after_finished=60,
        backoff_limit=2,
        queue_name="team-queue",
    ),
    "everything": everything,
}


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_is_the_one_that_was_written_down(name: str) -> None:
    assert CASES[name]() == json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_manifest_is_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(CASES[name](), version, strict=True)


@pytest.mark.parametrize("version", [f"{version}.0" if version.count(".") == 1 else version for version in VERSIONS])
def test_the_server_takes_the_manifest_and_knows_all_of_its_fields(version: str) -> None:
    with KubeServer(processes=False, version=version) as kube:
        for namespace in ("research", "u-somebody"):
            kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        for name, make in CASES.items():
            sent = make()
            sent["metadata"]["name"] = f"x-{name}"
            kept = kube.create(sent)
            assert _is_within(sent["spec"], kept["spec"]), name


def _is_within(part: Any, whole: Any) -> bool:
    """Whether everything that was sent was kept; the server adds defaults."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and _is_within(part[key], whole[key]) for key in part)
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(_is_within, part, whole))
    return bool(part == whole)


def test_the_gpu_is_a_string_in_limits_and_tolerated() -> None:
    spec = launched(gpu="T4")["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "g4dn.xlarge"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_an_unknown_gpu_asks_for_one_anywhere() -> None:
    spec = launched(gpu="B9000", gpu_resource_key="amd.com/gpu")["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert "nodeSelector" not in spec
    assert spec["tolerations"][0]["key"] == "amd.com/gpu"


def test_tolerations_of_the_caller_stand_alone_even_if_there_are_none() -> None:
    assert "tolerations" not in launched(gpu="T4", tolerations=[])["spec"]["template"]["spec"]


def test_the_rank_comes_through_the_downward_api() -> None:
    env = launched()["spec"]["template"]["spec"]["containers"][0]["env"]
    (rank,) = [variable for variable in env if variable["name"] == "REPLICA_RANK"]
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{COMPLETION_INDEX}']"
    assert {"name": "WORLD_SIZE", "value": "2"} in env


@pytest.mark.parametrize("runtime", ["gvisor", "kata-qemu"])
def test_a_gpu_in_a_sandbox_is_warned_of(runtime: str) -> None:
    with pytest.warns(UserWarning, match="sandbox"):
        launched(gpu="T4", runtime_class_name=runtime)
    launched(runtime_class_name=runtime)  # without a GPU there is nothing to say


def test_a_name_that_would_be_no_host_name_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="too long"):
        launched(1001, run_id="x" * 51)
    with pytest.raises(ValueError, match="lower-case"):
        EKSExecutor("image", run_id="Run_1", batch_api=object(), core_api=object())


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        (None, ()),
        ("", ()),
        ("0", (0,)),
        ("1,3-5,7", (1, 3, 4, 5, 7)),
        (" 1 , 3 - 4 ", (1, 3, 4)),
        ("5-3", (3, 4, 5)),
        ("1,,2", (1, 2)),
    ],
)
def test_indexes_are_read(text: str | None, indexes: tuple[int, ...]) -> None:
    assert parse_indexes(text) == set(indexes)


def test_a_token_that_is_no_index_is_skipped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'x'"):
        assert parse_indexes("1,x,3") == {1, 3}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert parse_indexes("-1,2-,2") == {2}
    assert len(told) == 2


if __name__ == "__main__":
    for case, make in CASES.items():
        (GOLDEN / f"{case}.json").write_text(json.dumps(make(), indent=2) + "\n")
