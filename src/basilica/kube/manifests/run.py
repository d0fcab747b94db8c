"""Manifests of all objects of one run on a cluster. Pure.

A pod for each rank, the Service that gives ranks their names, the rendezvous with its own address,
two network policies, an account without rights, and a Secret for values that must not be read in a manifest.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from basilica.core import environment as env
from basilica.core.deployment import Owner
from basilica.core.fencing import FenceTimes
from basilica.core.spec import DeploymentSpec, Shell
from basilica.kube.manifests import archives
from basilica.kube.manifests.egress import INTERNET, rules_of_ranks, rules_of_rendezvous
from basilica.kube.manifests.gang import QUEUE_NAME, Container, Gang, Json, literal, rank_pod
from basilica.kube.manifests.userdeployment import API_VERSION, GROUP, INSTANCE_LABEL, KIND

MANAGED_BY = "app.kubernetes.io/managed-by"
ROLE = f"{GROUP}/role"
WORKER, RENDEZVOUS, BENCH = "worker", "rendezvous", "bench"
POD_FINALIZER = f"{GROUP}/exit"  # held until the exit of the rank in the pod is recorded
RANK = f"{GROUP}/rank"  # an annotation: Kueue takes pods with other labels for pods of another kind
POD_GROUP, POD_GROUP_SIZE = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
POD_GROUP_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
PROVIDER, REGION, GPU_MODEL = f"{GROUP}/provider", "topology.kubernetes.io/region", f"{GROUP}/gpu-model"
GPU_PRODUCT, GPU_MEMORY, GPUS = "nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu"
HOSTNAME = "kubernetes.io/hostname"
RENDEZVOUS_PORT, MASTER_PORT = 2379, 29500
SERVICE_NAME_MAX = 63
OF_THE_RANK_ALONE = ("PATH", "PYTHONHOME")  # our entrypoint starts with those of the image
MIB_PER_GB = 10**9 / (1 << 20)
RENDEZVOUS_NODE_SECONDS = 5  # short: its ranks survive the move and wait for it (`core.fencing`)
RECORD_SECONDS = 10  # for the record of a stopped rank's exit
GATE_SECONDS = 3600  # ranks wait for the control plane's release, once enough of them are placed
WORKER_CONTAINER = "rank"
CARRIED_AT = "/opt/basilica"  # the place of our entrypoint in images that lack it
CHECKPOINTS, SNAPSHOTS = "/checkpoints", "/snapshots"
SELECTOR = f"{MANAGED_BY}=basilica,{ROLE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings for runs on a cluster. `image`: ours, for runs that name none and for the rendezvous.

    `entrypoint` precedes every rank's command in images that have it; others get it from ours by an init
    container, unless `carries` is off: then all images have it. `rendezvous_command` serves etcd's v2 keys API on port
    2379 of `$(POD_IP)`. `user`: whom containers run as. `egress`: what ranks reach besides each
    other: `internet` (all but private networks), or networks. `checkpoints`: a volume that all ranks of a namespace
    share, by the name of its claim. `node_seconds`: how long pods of a node that does not answer any more are waited
    for before others take their places. `fence`: when an agent that is cut off stops its rank, and when the rank may
    be replaced. `archive_bytes`: how large a directory may be, packed, that is sent along.
    """

    image: str
    entrypoint: Sequence[str] = ("python", "-m", "basilica.entrypoint")
    carries: bool = True
    rendezvous_image: str = ""
    rendezvous_command: Sequence[str] = (
        *("python", "-m", "basilica.rendezvous", "--host", "$(POD_IP)"),
        *("--port", str(RENDEZVOUS_PORT), "--data-dir", "/data"),
    )
    control_namespace: str = "basilica-system"
    queue: str | None = None
    user: int | None = 1000
    egress: Sequence[str] = (INTERNET,)
    checkpoints: str | None = None
    image_pull_secrets: Sequence[str] = ()
    holds_pods: bool = True
    node_seconds: int = 30
    fence: FenceTimes = field(default_factory=FenceTimes)
    archive_bytes: int = 16 << 20
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods that Kueue admits together: `size` of them, no more and no less."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObjects:
    """Renders the objects of one run."""

    instance: str
    namespace: str
    spec: DeploymentSpec
    owner: Owner | None
    settings: Settings

    # ---- names

    @property
    def rendezvous(self) -> str:
        """The name that the published client shows to its users, unless it would be too long for a Service."""
        name = f"{self.instance}-rendezvous"
        return name if len(name) <= SERVICE_NAME_MAX else f"{self.instance}-rdzv"

    @property
    def bench(self) -> str:
        return f"{self.instance}-bench"

    @property
    def secret(self) -> str:
        return f"{self.instance}-env"

    @property
    def kept(self) -> str:
        return f"{self.instance}-results"

    def paths(self) -> dict[str, str]:
        """Return the API path of each object of the run."""
        core, name = f"/api/v1/namespaces/{self.namespace}", self.instance
        policies = f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"
        return {
            "account": f"{core}/serviceaccounts/{name}",
            "secret": f"{core}/secrets/{self.secret}",
            "names": f"{core}/services/{name}",
            "rendezvous_policy": f"{policies}/{self.rendezvous}",
            "worker_policy": f"{policies}/{name}",
            "rendezvous": f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{self.rendezvous}",
            "rendezvous_service": f"{core}/services/{self.rendezvous}",
            "kept": f"{core}/secrets/{self.kept}",
        }

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def pod_name(self, rank: int, incarnation: int) -> str:
        """Return the pod's name, which is the same for every creator: the second one to try finds the pod there."""
        return f"{self.instance}-{rank}-{incarnation}"

    def selector(self, *roles: str) -> str:
        """Return a label selector for the pods of this run in these roles."""
        return f"{MANAGED_BY}=basilica,{INSTANCE_LABEL}={self.instance},{ROLE} in ({','.join(roles)})"

    def labels(self, role: str) -> dict[str, str]:
        return {MANAGED_BY: "basilica", INSTANCE_LABEL: self.instance, ROLE: role}

    def _metadata(self, name: str, role: str) -> Json:
        found: Json = {"name": name, "namespace": self.namespace, "labels": self.labels(role)}
        reference = self._owner_reference()
        return found | ({} if reference is None else {"ownerReferences": [reference]})

    def _owner_reference(self) -> Json | None:
        if self.owner is None:
            return None
        who = {"apiVersion": API_VERSION, "kind": KIND, "name": self.owner.name, "uid": self.owner.uid}
        return {**who, "controller": True, "blockOwnerDeletion": False}

    # ---- the gang's surroundings

    def surroundings(self) -> dict[str, Json]:
        """Return all but the pods and the rendezvous' Service, by the names of `paths`."""
        found = {
            "account": self._account(),
            "names": self._names(),
            "rendezvous_policy": self._rendezvous_policy(),
            "worker_policy": self._worker_policy(),
            "rendezvous": self._rendezvous(),
        }
        return found | ({"secret": self._secret()} if self.spec.secrets else {})

    def _account(self) -> Json:
        metadata = self._metadata(self.instance, WORKER)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
        return account | {"automountServiceAccountToken": False}

    def _secret(self) -> Json:
        data = {name: base64.b64encode(value.encode()).decode() for name, value in self.spec.secrets.items()}
        metadata = self._metadata(self.secret, WORKER)
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}

    def _names(self) -> Json:
        """Return the Service that names ranks `<instance>-<rank>.<instance>`, also before they are up: they wait for
        each other.
        """
        spec = {"clusterIP": "None", "selector": self.labels(WORKER), "publishNotReadyAddresses": True}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(self.instance, WORKER), "spec": spec}

    def rendezvous_service(self, address: str | None = None) -> Json:
        """Return the Service. `address`: the one that ranks know already, should it have been deleted."""
        port = {"name": "keys", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT, "protocol": "TCP"}
        spec: Json = {"selector": self.labels(RENDEZVOUS), "ports": [port]}
        spec |= {} if address is None else {"clusterIP": address}
        metadata = self._metadata(self.rendezvous, RENDEZVOUS)
        return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}

    def _rendezvous(self) -> Json:
        container = {
            "name": "keys",
            "image": self.settings.rendezvous_image or self.settings.image,
            "command": list(self.settings.rendezvous_command),
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"containerPort": RENDEZVOUS_PORT, "protocol": "TCP"}],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
            "securityContext": _CONTAINER_SECURITY,
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        pod = {**self._pod(), "containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]}
        pod["tolerations"] = _tolerations(min(RENDEZVOUS_NODE_SECONDS, self.settings.node_seconds))
        labels = self.labels(RENDEZVOUS)
        spec = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        metadata = self._metadata(self.rendezvous, RENDEZVOUS)
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}

    def _pod(self) -> Json:
        security: Json = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        if self.settings.user is not None:
            # Without a group of its own a container has the image's, which is 0 where the user is not in its passwd.
            security |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), self.settings.user)
        found: Json = {
            "serviceAccountName": self.instance,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": security,
            "tolerations": _tolerations(self.settings.node_seconds),
        }
        if self.settings.image_pull_secrets:
            found["imagePullSecrets"] = [{"name": name} for name in self.settings.image_pull_secrets]
        return found

    # ---- network policies

    def _policy(self, role: str, name: str, rules: Json) -> Json:
        spec = {"podSelector": {"matchLabels": self.labels(role)}, **rules, "policyTypes": ["Ingress", "Egress"]}
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
        return {**kind, "metadata": self._metadata(name, role), "spec": spec}

    def _worker_policy(self) -> Json:
        rules = rules_of_ranks(self.labels(WORKER), self.labels(RENDEZVOUS), self.settings.egress)
        return self._policy(WORKER, self.instance, rules)

    def _rendezvous_policy(self) -> Json:
        run = {MANAGED_BY: "basilica", INSTANCE_LABEL: self.instance}
        rules = rules_of_rendezvous(run, self.settings.control_namespace, RENDEZVOUS_PORT)
        return self._policy(RENDEZVOUS, self.rendezvous, rules)

    # ---- the gang

    def keep(self, data: Mapping[str, bytes], annotations: Mapping[str, str]) -> Json:
        """Return the Secret of the ranks' results and reports, for readers after the end of the rendezvous."""
        metadata = {**self._metadata(self.kept, RENDEZVOUS), "annotations": dict(annotations)}
        encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded}

    def worker_pod(
        self, rank: int, incarnation: int, endpoint: str, *, archive_parts: int = 0, group: PodGroup | None = None
    ) -> Json:
        """Return the pod of a rank, which finds its rendezvous at `endpoint`. Kubernetes places it; all else is ours to
        do.

        `archive_parts`: of the run's archive; 0 if that is not there, which its ranks then report. `group`: the pods
        that Kueue admits together with it, where there is a queue.
        """
        labels, annotations = self.labels(WORKER), {RANK: str(rank)}
        if self.settings.queue is not None and group is not None:
            labels |= {QUEUE_NAME: self.settings.queue, POD_GROUP: group.name}
            annotations[POD_GROUP_SIZE] = str(group.size)
        gang = Gang(
            name=self.instance,
            namespace=self.namespace,
            size=max(self.spec.world.max, rank + 1),
            container=self._worker(endpoint, archive_parts),
            labels=labels,
            pod_annotations=annotations,
            pod_finalizers=(POD_FINALIZER,) if self.settings.holds_pods else (),
            owner=self._owner_reference(),
            pod=self._worker_pod(archive_parts),
        )
        return rank_pod(gang, rank, self.pod_name(rank, incarnation))

    def bench_pods(self, nodes: Sequence[str], endpoint: str, *, strict: bool) -> list[Json]:
        """Return two probes that meet through the run's rendezvous, on the nodes of its ranks, without a GPU or a
        retry.
        """
        at_home = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": list(nodes)}]}
        affinity: Json = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [at_home]}}
            if strict
            else {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": at_home}]}
        }
        if len(nodes) > 1:
            apart = {"labelSelector": {"matchLabels": self.labels(BENCH)}, "topologyKey": HOSTNAME}
            wish = [{"weight": 100, "podAffinityTerm": apart}]
            affinity["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": wish}
        probe = (
            f"exec python -m basilica.bench.probe --rank $BENCH_RANK --rendezvous {endpoint} --key {self.instance} "
            f"--out ${{{env.TERMINATION_LOG}:-/dev/termination-log}}"
        )
        container = Container(
            name=WORKER_CONTAINER,
            image=self.settings.image,
            command=["/bin/sh", "-c", literal(probe)],
            env={"OMP_NUM_THREADS": "1"},
            rank_env="BENCH_RANK",
            fields={"NODE_NAME": "spec.nodeName"},
            requests={"cpu": "100m", "memory": "256Mi"},
            more={"securityContext": _CONTAINER_SECURITY},
        )
        return [
            rank_pod(
                Gang(
                    name=self.bench,
                    namespace=self.namespace,
                    size=2,
                    container=container,
                    labels=self.labels(BENCH),
                    pod_annotations={RANK: str(rank)},
                    owner=self._owner_reference(),
                    pod={**self._pod(), "affinity": affinity},
                ),
                rank,
                f"{self.bench}-{rank}",
            )
            for rank in range(2)
        ]

    @property
    def _carries(self) -> bool:
        """Whether our entrypoint must be injected into the run's image."""
        return self.settings.carries and self.spec.image not in ("", self.settings.image)

    def _carrier(self) -> Json:
        return {
            "name": "basilica",
            "image": self.settings.image,
            "command": ["python", "-m", "basilica.rank.inject", CARRIED_AT],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
            "securityContext": _CONTAINER_SECURITY,
            "volumeMounts": [_CARRIED_MOUNT],
        }

    def _worker(self, endpoint: str, archive_parts: int) -> Container:
        program = self.spec.program
        argv = ["/bin/sh", "-c", program.script, "--", *program.args] if isinstance(program, Shell) else program.argv
        entrypoint = (f"{CARRIED_AT}/start",) if self._carries else self.settings.entrypoint
        resources = self.spec.resources
        amounts: dict[str, str] = {}
        if resources.cpu is not None:
            amounts["cpu"] = f"{math.ceil(resources.cpu * 1000)}m"
        if resources.memory_bytes is not None:
            amounts["memory"] = str(resources.memory_bytes)
        if resources.gpus.count:
            amounts[GPUS] = str(resources.gpus.count)
        more: Json = {
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": _CONTAINER_SECURITY,
            "volumeMounts": [
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": "checkpoints", "mountPath": CHECKPOINTS},
                {"name": "snapshots", "mountPath": SNAPSHOTS},
                *([_CARRIED_MOUNT] if self._carries else []),
                *(archives.mounts() if self.spec.archive is not None else []),
            ],
        }
        environment = self._environment(endpoint)
        if self.spec.archive is not None:
            environment |= archives.environment(self.spec.archive, archive_parts, self.spec.workdir)
        elif self.spec.workdir is not None:
            more["workingDir"] = self.spec.workdir
        if self.spec.secrets:
            more["envFrom"] = [{"secretRef": {"name": self.secret}}]
        return Container(
            name=WORKER_CONTAINER,
            image=self.spec.image or self.settings.image,
            command=[*entrypoint, "--", *map(literal, argv)],
            env=environment,
            rank_env=env.RANK,
            fields={
                "NODE_NAME": "spec.nodeName",
                env.POD_UID: "metadata.uid",
                env.HOST_ADDRESS: "status.podIP",
            },
            requests=amounts,
            limits=amounts,
            more=more,
        )

    def _environment(self, endpoint: str) -> dict[str, str]:
        """Return the variables of all pods of the run; secrets come from their Secret, and would be replaced here."""
        spec = self.spec
        given = {name: value for name, value in env.user_environment(spec).items() if name not in spec.secrets}
        apart = {name: given.pop(name) for name in OF_THE_RANK_ALONE if name in given}
        shared = env.run_environment(
            spec,
            self.instance,
            machine=self.settings.env,
            user=given,
            master=(f"{self.instance}-0.{self.instance}", MASTER_PORT),
            rendezvous=endpoint,
            checkpoints=self._checkpoints(self.instance),
            snapshots=SNAPSHOTS,
        )
        resumed: dict[str, str] = {}
        if self.settings.checkpoints is not None:  # else there is no volume that an earlier run has left anything in
            resumed = env.resume_environment(spec, lambda instance: [f"{self._checkpoints(instance)}/snapshots"])
        return shared | {
            **resumed,
            **({env.RANK_ENV: json.dumps(apart)} if apart else {}),
            env.DRIVEN: "1",
            env.FENCE: self.settings.fence.for_agents(spec.world.max),
            env.MESH_TIMEOUT: str(GATE_SECONDS),
            env.NOTICE_SECONDS: f"{spec.notice_seconds:g}",
            env.GRACE_SECONDS: f"{spec.grace_seconds:g}",
            **({} if spec.notice_signal is None else {env.NOTICE_SIGNAL: spec.notice_signal}),
        }

    def _checkpoints(self, instance: str) -> str:
        """Return the checkpoint directory of a run: its own in the volume that all runs share."""
        return CHECKPOINTS if self.settings.checkpoints is None else f"{CHECKPOINTS}/{instance}"

    def _worker_pod(self, archive_parts: int) -> Json:
        shared: Json = {"emptyDir": {}}
        if self.settings.checkpoints is not None:
            shared = {"persistentVolumeClaim": {"claimName": self.settings.checkpoints}}
        memory: Json = {"medium": "Memory"}
        if self.spec.resources.memory_bytes is not None:  # the volume counts against the limit of the container
            memory["sizeLimit"] = str(self.spec.resources.memory_bytes // 2)
        found: Json = {
            **self._pod(),
            "subdomain": self.instance,
            "terminationGracePeriodSeconds": math.ceil(self.spec.notice_seconds + self.spec.grace_seconds)
            + RECORD_SECONDS,
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": "checkpoints", **shared},
                {"name": "snapshots", "emptyDir": memory},
            ],
        }
        if self._carries:
            found["initContainers"] = [self._carrier()]
            found["volumes"].append({"name": "basilica", "emptyDir": {}})
        if self.spec.archive is not None:
            found["volumes"] += archives.volumes(self.spec.archive, archive_parts)
        if self.spec.resources.gpus.count:
            found["tolerations"].append({"key": GPUS, "operator": "Exists", "effect": "NoSchedule"})
        affinity = self._affinity()
        spread = {"provider-aware": PROVIDER, "region-aware": REGION}.get(self.spec.topology_spread)
        if spread is not None:
            selector = {"matchLabels": self.labels(WORKER)}
            rule = {"maxSkew": 1, "topologyKey": spread, "whenUnsatisfiable": "ScheduleAnyway"}
            found["topologySpreadConstraints"] = [{**rule, "labelSelector": selector}]
        return found | ({"affinity": affinity} if affinity else {})

    def _affinity(self) -> Json:
        found: Json = {}
        terms = self._node_terms()
        if terms:
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            found["nodeAffinity"] = required
        if self.spec.topology_spread == "pack":
            near = {"labelSelector": {"matchLabels": self.labels(WORKER)}, "topologyKey": HOSTNAME}
            wish = [{"weight": 100, "podAffinityTerm": near}]
            found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": wish}
        return found

    def _node_terms(self) -> list[Json]:
        """Return terms of which one must hold: a GPU's model is on one label or the other."""
        gpus, wish = self.spec.resources.gpus, self.spec.provider_filter
        always: list[Json] = []
        if wish.include:
            always.append({"key": PROVIDER, "operator": "In", "values": list(wish.include)})
        if wish.exclude:
            always.append({"key": PROVIDER, "operator": "NotIn", "values": list(wish.exclude)})
        if gpus.min_memory_gb is not None:
            least = int(gpus.min_memory_gb * MIB_PER_GB) - 1
            always.append({"key": GPU_MEMORY, "operator": "Gt", "values": [str(least)]})
        if gpus.models:
            one_of = {"operator": "In", "values": list(gpus.models)}
            return [{"matchExpressions": [{"key": key, **one_of}, *always]} for key in (GPU_MODEL, GPU_PRODUCT)]
        return [{"matchExpressions": always}] if always else []


_NODE_TROUBLE = {"operator": "Exists", "effect": "NoExecute"}
_CARRIED_MOUNT: Json = {"name": "basilica", "mountPath": CARRIED_AT}
_CONTAINER_SECURITY: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _tolerations(seconds: int) -> list[Json]:
    """Return the tolerations that limit a pod's stay on a node that does not answer."""
    return [
        {**_NODE_TROUBLE, "key": f"node.kubernetes.io/{what}", "tolerationSeconds": seconds}
        for what in ("unreachable", "not-ready")
    ]
