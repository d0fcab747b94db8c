"""What `basilica manifests` prints is what Kubernetes takes, gives no more rights than are used, and is checked in."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from basilica.core.quantities import format_cpu, format_memory, parse_cpu, parse_memory
from basilica.core.spec import Exec, Shell
from basilica.kube.manifests.control_plane import manifests
from basilica.kube.manifests.crd import definition
from basilica.kube.manifests.userdeployment import body_of, spec_of
from basilica.kube.manifests.yaml import to_yaml
from basilica_testkube import KubeServer
from tests.support.specs import WHOLE

ROOT = Path(__file__).parents[2]
IMAGE = "example.com/basilica:1"
EVERYTHING = manifests(namespace="basilica-system", image=IMAGE, with_api=True)


def printed(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "basilica.cli.main", "manifests", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("manifest", EVERYTHING, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_every_manifest_is_valid(manifest: dict[str, Any], version: str) -> None:
    if version == "1.29" and manifest["kind"].startswith("ValidatingAdmissionPolicy"):
        pytest.skip("Kubernetes has had these since 1.30, and what they hold is held without them less strictly")
    kubernetes_validate.validate(manifest, version, strict=True)


def test_what_is_printed_reads_back_as_what_was_meant() -> None:
    assert printed("--image", IMAGE, "--with-api") == EVERYTHING


def test_without_the_api_nothing_of_it_is_printed() -> None:
    found = printed("--namespace", "elsewhere")
    assert not [m for m in found if m["metadata"]["name"].startswith("basilica-api")]
    assert {m["metadata"]["namespace"] for m in found if "namespace" in m["metadata"]} == {"elsewhere"}


def test_pods_keep_to_the_restricted_standard() -> None:
    pods = [m["spec"]["template"]["spec"] for m in EVERYTHING if m["kind"] == "Deployment"]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_no_right_is_a_wildcard() -> None:
    rules = [(m["metadata"]["name"], rule) for m in EVERYTHING for rule in m.get("rules", ())]
    assert rules
    for name, rule in rules:
        assert "*" not in str(rule), name
    roles = [(name, rule) for name, rule in rules if "rbac" in rule["apiGroups"][0]]
    assert {name for name, _ in roles} == {"basilica-operator"}
    assert [rule["resourceNames"] for _, rule in roles if "bind" in rule["verbs"]] == [
        ["basilica-api-runs", "basilica-operator-runs"]
    ]
    assert not [rule for _, rule in roles if "escalate" in rule["verbs"]]


def test_commands_in_pods_are_run_by_the_api_alone() -> None:
    rules = [(m["metadata"]["name"], rule) for m in EVERYTHING for rule in m.get("rules", ())]
    assert [(name, rule["verbs"]) for name, rule in rules if "pods/exec" in rule["resources"]] == [
        ("basilica-api-runs", ["get", "create"])
    ]


def test_api_servers_keep_directories_and_the_operator_alone_forgets_them() -> None:
    verbs = {
        m["metadata"]["name"]: set(rule["verbs"])
        for m in EVERYTHING
        if m["kind"] == "ClusterRole"
        for rule in m["rules"]
        if rule["resources"] == ["configmaps"]
    }
    assert verbs == {
        "basilica-operator": {"list"},
        "basilica-operator-runs": {"get", "list", "create", "patch", "delete"},
        "basilica-api": {"get", "list"},
        "basilica-api-runs": {"create", "patch"},
    }


def test_the_definition_is_checked_in() -> None:
    assert (ROOT / "deploy" / "crd.yaml").read_text() == to_yaml([definition()])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_applies_everything_twice_and_shows_a_run(tmp_path: Path) -> None:
    with KubeServer(processes=False) as kube:
        config = kube.kubeconfig(tmp_path / "config")

        def kubectl(*arguments: str, stdin: str = "") -> str:
            command = ["kubectl", "--kubeconfig", str(config), *arguments]
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr
            return done.stdout

        for said in ("created", "unchanged"):
            told = kubectl("apply", "--validate=false", "-f", "-", stdin=to_yaml(EVERYTHING))
            assert f"customresourcedefinition.apiextensions.k8s.io/userdeployments.basilica.dev {said}" in told
        example = (ROOT / "deploy" / "example.yaml").read_text()
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "u-alice"}})
        assert "created" in kubectl("apply", "--validate=false", "-f", "-", stdin=example)
        assert "unchanged" in kubectl("apply", "--validate=false", "-f", "-", stdin=example)
        kubectl("scale", "ud", "hello", "--namespace", "u-alice", "--replicas", "4")
        scaled = kube.get("userdeployments", "hello", "u-alice")
        assert scaled is not None
        assert scaled["spec"]["distributed"]["worldSize"]["target"] == 4
        kubectl("patch", "ud", "hello", "--namespace", "u-alice", "--type", "merge", "-p", '{"spec":{"cancel":true}}')
        assert kubectl("get", "ud", "--namespace", "u-alice", "-o", "name") == "userdeployment.basilica.dev/hello\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["serve", "--store", "kubernetes", "--retention", "3d"], "the operator has --retention"),
        (["serve", "--store", "kubernetes", "--idle-exit", "15m"], "has no meaning with --store kubernetes"),
        (["serve", "--store", "etcd"], "etcd"),
        (["operator", "--log-level", "loud"], "use debug, info, warning or error"),
        (["operator", "--retention", "soon"], "is no duration"),
    ],
)
def test_wrong_usage_is_told(options: list[str], told: str) -> None:
    command = [sys.executable, "-m", "basilica.cli.main", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_namespace_that_is_none_is_refused() -> None:
    command = [sys.executable, "-m", "basilica.cli.main", "manifests", "--namespace", "Not A Name"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "try 'not-a-name'" in done.stderr


# ---- the resource and the core ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [WHOLE.program, Shell("echo $1", ("a b", ""))])
def test_a_spec_survives_the_api_server(program: Exec | Shell) -> None:
    spec = dataclasses.replace(WHOLE, program=program)
    with KubeServer(processes=False) as kube:
        kube.create(definition())
        metadata = {"name": "some-object"}
        body = body_of(spec, secret="some-secret")
        kube.create(
            {"apiVersion": "basilica.dev/v1alpha1", "kind": "UserDeployment", "metadata": metadata, "spec": body}
        )
        found = kube.get("userdeployments", "some-object")
        assert found is not None
        assert found["spec"] == body, "the schema knows every field"
        assert spec_of(found, spec.secrets) == spec


@pytest.mark.parametrize("cores", [0.001, 0.5, 1.0, 8.0, 0.333, 1.5, 0.1 + 0.2, 100_000.0, 1 / 3])
def test_cores_read_back_as_they_were_written(cores: float) -> None:
    assert parse_cpu(format_cpu(cores), "cpu") == pytest.approx(cores, abs=1e-9)


@pytest.mark.parametrize("size", [1 << 20, 1 << 30, (1 << 30) + 1, 1 << 60, 123456789, (1 << 60) - 1])
def test_bytes_read_back_as_they_were_written(size: int) -> None:
    assert parse_memory(format_memory(size), "memory") == size


def test_replicas_are_apart_and_leave_a_lost_node_soon() -> None:
    for manifest in (m for m in EVERYTHING if m["kind"] == "Deployment"):
        pod = manifest["spec"]["template"]["spec"]
        [spread] = pod["topologySpreadConstraints"]
        assert spread["matchLabelKeys"] == ["pod-template-hash"]  # else those that an update ends count too
        patience = {each["key"]: each["tolerationSeconds"] for each in pod["tolerations"]}
        assert patience == {"node.kubernetes.io/unreachable": 30, "node.kubernetes.io/not-ready": 30}
