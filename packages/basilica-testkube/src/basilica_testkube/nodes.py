"""Nodes, the scheduler that puts pods on them, and what happens when one is lost."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from basilica_testkube.events import Events
from basilica_testkube.kinds import NODES, PODS
from basilica_testkube.kubelet import Kubelet
from basilica_testkube.options import DeleteOptions
from basilica_testkube.quantities import amount
from basilica_testkube.registry import Registry
from basilica_testkube.selectors import matches_expression
from basilica_testkube.store import Change
from basilica_testkube.timing import Timing
from basilica_testkube.values import (
    Json,
    has_condition,
    is_deleting,
    is_ended,
    key_of,
    labels_of,
    meta,
    set_condition,
)

_PLENTY = {"cpu": "100000", "memory": "1000Ti", "pods": "100000", "ephemeral-storage": "1000Ti"}
_UNREACHABLE = "node.kubernetes.io/unreachable"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A machine of the cluster. What `capacity` does not mention it has plenty of, GPUs excepted."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()

    def manifest(self) -> Json:
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels}
        spec = {"taints": [dict(taint) for taint in self.taints]} if self.taints else {}
        return {"metadata": {"name": self.name, "labels": labels}, "spec": spec}


class Scheduler:
    """Binds pods to nodes that fit them; says why not where none does."""

    def __init__(self, registry: Registry, timing: Timing, events: Events) -> None:
        self._registry, self._timing, self._events = registry, timing, events
        self._waiting: dict[str, Json] = {}
        self._bound: dict[str, tuple[str, dict[str, float]]] = {}  # pod uid to node and what it takes there
        self._used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._due = False
        registry.store.listen(self._note)

    def _note(self, change: Change) -> None:
        if change.kind == PODS:
            self._note_pod(change)
        elif change.kind == NODES and self._waiting:
            self._soon()

    def _note_pod(self, change: Change) -> None:
        pod, uid = change.obj, meta(change.obj)["uid"]
        node = pod["spec"].get("nodeName")
        over = change.type == "DELETED" or is_ended(pod)
        if over or node or is_deleting(pod):
            self._waiting.pop(uid, None)
        if node and not over and uid not in self._bound:
            needs = _needs(pod)
            self._bound[uid] = node, needs
            for name, wanted in needs.items():
                self._used[node][name] += wanted
        elif over and uid in self._bound:
            node, needs = self._bound.pop(uid)
            for name, wanted in needs.items():
                self._used[node][name] -= wanted
            if self._waiting:
                self._soon()
        elif not node and not over and not is_deleting(pod):
            before = self._waiting.get(uid)
            if before is None or before["spec"].get("schedulingGates") != pod["spec"].get("schedulingGates"):
                self._soon()
            self._waiting[uid] = pod

    def _soon(self) -> None:
        if not self._due:
            self._due = True
            self._registry.clock.call_later(self._timing.schedule, self._schedule)

    def _schedule(self) -> None:
        self._due = False
        nodes = list(self._registry.store.items(NODES))
        for pod in list(self._waiting.values()):
            if pod["spec"].get("schedulingGates"):
                self._say_gated(pod)
                continue
            reasons: dict[str, int] = defaultdict(int)
            for node in nodes:
                why = self._misfit(pod, node)
                if why is None:
                    self._bind(pod, node)
                    break
                reasons[why] += 1
            else:
                self._cannot(pod, len(nodes), reasons)

    def _misfit(self, pod: Json, node: Json) -> str | None:
        if node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        labels = labels_of(node)
        selector = pod["spec"].get("nodeSelector") or {}
        if any(labels.get(key) != value for key, value in selector.items()) or not _affine(pod, labels):
            return "node(s) didn't match Pod's node affinity/selector"
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] != "PreferNoSchedule" and not tolerates(pod, taint):
                return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
        if not has_condition(node, "Ready"):
            return "node(s) were not ready"
        allocatable = node["status"]["allocatable"]
        for name, wanted in _needs(pod).items():
            if self._used[meta(node)["name"]][name] + wanted > amount(allocatable.get(name, 0)):
                return "Too many pods" if name == "pods" else f"Insufficient {name}"
        return None

    def _bind(self, pod: Json, node: Json) -> None:
        name = meta(node)["name"]

        def edit(new: Json) -> None:
            new["spec"]["nodeName"] = name
            set_condition(new["status"], self._registry.clock.stamp(), "PodScheduled", "True")

        self._registry.change(PODS, pod, edit, whole=True)

    def _say_gated(self, pod: Json) -> None:
        message = "Scheduling is blocked due to non-empty scheduling gates"

        def edit(new: Json) -> None:
            now = self._registry.clock.stamp()
            set_condition(new["status"], now, "PodScheduled", "False", reason="SchedulingGated", message=message)

        self._registry.change(PODS, pod, edit)

    def _cannot(self, pod: Json, nodes: int, reasons: Mapping[str, int]) -> None:
        told = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
        message = f"0/{nodes} nodes are available: {told}." if nodes else "no nodes available to schedule pods"

        def edit(new: Json) -> None:
            now = self._registry.clock.stamp()
            set_condition(new["status"], now, "PodScheduled", "False", reason="Unschedulable", message=message)

        changed = self._registry.change(PODS, pod, edit)
        if changed is not None and changed is not pod:
            self._events.tell(pod, "Warning", "FailedScheduling", message)


def _needs(pod: Json) -> dict[str, float]:
    needs: dict[str, float] = defaultdict(float)
    needs["pods"] = 1
    for container in pod["spec"]["containers"]:
        for name, wanted in ((container.get("resources") or {}).get("requests") or {}).items():
            needs[name] += amount(wanted)
    return needs


def _affine(pod: Json, labels: dict[str, str]) -> bool:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    terms: Iterable[Json] = required["nodeSelectorTerms"]
    return any(all(matches_expression(labels, rule) for rule in term.get("matchExpressions") or []) for term in terms)


def tolerates(pod: Json, taint: Mapping[str, str]) -> bool:
    for toleration in pod["spec"].get("tolerations") or []:
        if toleration.get("effect") not in (None, "", taint["effect"]):
            continue
        if toleration.get("operator") == "Exists":
            if toleration.get("key") in (None, "", taint["key"]):
                return True
        elif toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""):
            return True
    return False


class NodeController:
    """Makes nodes, notices that one says nothing any more, and clears up after those that are removed."""

    def __init__(self, registry: Registry, timing: Timing, kubelet: Kubelet, events: Events) -> None:
        self._registry, self._timing, self._kubelet, self._events = registry, timing, kubelet, events
        registry.store.listen(self._note)

    def add(self, spec: NodeSpec) -> None:
        node = self._registry.create(NODES, "", spec.manifest())
        capacity = {**_PLENTY, **spec.capacity}

        def ready(new: Json) -> None:
            new["status"] = {
                "capacity": capacity,
                "allocatable": capacity,
                "addresses": [
                    {"type": "InternalIP", "address": "127.0.0.1"},
                    {"type": "Hostname", "address": spec.name},
                ],
            }
            self._set_ready(new, "True", "KubeletReady")

        self._registry.change(NODES, node, ready)

    def _set_ready(self, node: Json, value: str, reason: str) -> None:
        set_condition(node["status"], self._registry.clock.stamp(), "Ready", value, reason=reason)

    def lose(self, name: str) -> None:
        """The node stops answering; the cluster finds out after a while, and evicts its pods after another."""
        node = self._registry.get(NODES, "", name)
        self._kubelet.lose(name)
        self._registry.clock.call_later(self._timing.node_grace, partial(self._unreachable, node))

    def cut(self, name: str) -> None:
        """As `lose`, but what runs on the node goes on: only its word does not come through."""
        node = self._registry.get(NODES, "", name)
        self._kubelet.cut(name)
        self._registry.clock.call_later(self._timing.node_grace, partial(self._unreachable, node))

    def rejoin(self, name: str) -> None:
        self._kubelet.rejoin(name)
        self._reachable(name)

    def find_again(self, name: str) -> None:
        self._kubelet.find_again(name)
        self._reachable(name)

    def _reachable(self, name: str) -> None:
        def edit(new: Json) -> None:
            self._set_ready(new, "True", "KubeletReady")
            new["spec"].pop("taints", None)

        self._registry.change(NODES, self._registry.get(NODES, "", name), edit, whole=True)

    def _unreachable(self, node: Json) -> None:
        found = self._registry.store.get(NODES, "", meta(node)["name"])
        if found is None or not self._kubelet.is_lost(meta(node)["name"]):
            return

        def edit(new: Json) -> None:
            self._set_ready(new, "Unknown", "NodeStatusUnknown")
            now = self._registry.clock.stamp()
            taints = [taint for taint in new["spec"].get("taints") or [] if taint["key"] != _UNREACHABLE]
            effects = ("NoSchedule", "NoExecute")
            new["spec"]["taints"] = [*taints, *({"key": _UNREACHABLE, "effect": e, "timeAdded": now} for e in effects)]

        self._registry.change(NODES, node, edit, whole=True)
        for pod in self._pods_on(meta(node)["name"]):
            self._registry.change(PODS, pod, self._not_ready)
            self._registry.clock.call_later(self._tolerated(pod), partial(self._evict, node, pod))

    def _not_ready(self, pod: Json) -> None:
        set_condition(pod["status"], self._registry.clock.stamp(), "Ready", "False", reason="NodeNotReady")

    def _tolerated(self, pod: Json) -> float:
        """How long a pod stays on a node that is out of reach: as it says, else as the cluster does."""
        said = [each for each in pod["spec"].get("tolerations") or [] if each.get("key") == _UNREACHABLE]
        seconds = next((each["tolerationSeconds"] for each in said if "tolerationSeconds" in each), 300)
        return self._timing.unreachable_toleration if seconds == 300 else float(seconds)

    def _evict(self, node: Json, pod: Json) -> None:
        """The taint manager's deletion. Without a kubelet to finish it, a pod stays as it is: terminating.

        While no node at all is heard from, the control plane blames itself and evicts nobody.
        """
        nodes = [meta(each)["name"] for each in self._registry.store.items(NODES)]
        if not self._kubelet.is_lost(meta(node)["name"]) or (len(nodes) > 1 and all(map(self._kubelet.is_lost, nodes))):
            return
        for found in self._pods_on(meta(node)["name"]):
            if meta(found)["uid"] == meta(pod)["uid"] and not is_deleting(found):
                self._kubelet.disrupt(found, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
                self._registry.delete(PODS, *key_of(found), DeleteOptions(uid=meta(found)["uid"]))

    def _note(self, change: Change) -> None:
        if change.kind == NODES and change.type == "DELETED":
            name = meta(change.obj)["name"]
            self._registry.clock.call_later(self._timing.garbage, partial(self._clear_up, name))

    def _clear_up(self, name: str) -> None:
        """Pods of a node that is not there any more are failed, and go without grace."""
        for pod in self._pods_on(name):
            self._kubelet.disrupt(pod, "DeletionByPodGC", "PodGC: node no longer exists")
            self._registry.change(PODS, pod, lambda new: new["status"].update(phase="Failed"))
            self._registry.delete(PODS, *key_of(pod), DeleteOptions(grace=0, uid=meta(pod)["uid"]))

    def _pods_on(self, name: str) -> list[Json]:
        found = self._registry.store.items(PODS)
        return [pod for pod in found if pod["spec"].get("nodeName") == name and not is_ended(pod)]
