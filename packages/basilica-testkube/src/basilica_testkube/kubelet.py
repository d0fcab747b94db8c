"""All nodes' kubelets in one: runs the pods that are bound to a node, and tells about them."""

import os
import random
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from basilica_testkube import environment
from basilica_testkube.errors import ApiError
from basilica_testkube.events import Events
from basilica_testkube.kinds import PODS, Kind
from basilica_testkube.options import DeleteOptions
from basilica_testkube.podworker import Node, PodWorker, Run
from basilica_testkube.processes import CLUSTER_MARK, MARK, Body, Command, Process, Puppet
from basilica_testkube.registry import Registry
from basilica_testkube.store import Change
from basilica_testkube.timing import Timing
from basilica_testkube.values import Json, annotations_of, is_deleting, is_ended, key_of, meta, set_condition
from basilica_testkube.volumes import mounts
from basilica_testkube.warden import Warden

MESSAGE_FILE = "BASILICA_TERMINATION_LOG"
"""Names the file that stands for `terminationMessagePath`, since a process has no `/dev` of its own."""

IGNORES_SIGTERM = "testing.basilica.dev/ignores-sigterm"
"""An annotation: this pod, where there are no processes, ends only by SIGKILL."""

_PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "COVERAGE_PROCESS_START",
)


class Kubelet:
    """Starts, watches and ends the containers of bound pods."""

    def __init__(
        self,
        registry: Registry,
        timing: Timing,
        events: Events,
        *,
        folder: Path,
        processes: bool,
        images: Mapping[str, Sequence[str]],
        env: Mapping[str, str],
        own_files: Sequence[str],
        start_delay: Callable[[Json], float],
    ) -> None:
        self._registry, self._timing, self._events, self._folder = registry, timing, events, folder
        self._processes, self._images, self._env, self._start_delay = processes, images, env, start_delay
        self._own_files = own_files
        self._name = uuid.uuid4().hex
        self._warden: Warden | None = None  # since the first process
        self._workers: dict[str, PodWorker] = {}
        self._lost: set[str] = set()
        self._addresses = random.getrandbits(22) & ~0xFF  # two clusters at once must not have the same
        self._node = Node(
            clock=registry.clock,
            timing=timing,
            start=self._start,
            write=partial(registry.change, PODS),
            finish=self._finish,
            tell=events.tell,
        )
        registry.store.listen(self._note)

    def _note(self, change: Change) -> None:
        if change.kind != PODS:
            return
        pod = change.obj
        uid, node = meta(pod)["uid"], pod["spec"].get("nodeName")
        worker = self._workers.get(uid)
        if change.type == "DELETED":
            if worker is not None:
                del self._workers[uid]
                self._registry.clock.call_later(0, worker.vanish)
            return
        if not node or node in self._lost:
            return
        if worker is None and not is_ended(pod) and not is_deleting(pod):
            self._adopt(pod)
        elif is_deleting(pod) and not (change.old and is_deleting(change.old) and _grace(change.old) == _grace(pod)):
            self._registry.clock.call_later(0, partial(self._stop, uid, pod))

    def _adopt(self, pod: Json) -> None:
        self._addresses += 1
        n = self._addresses
        address = f"127.{16 + (n >> 16) % 64}.{n >> 8 & 255}.{n & 255}"
        folder = self._folder / meta(pod)["uid"]
        worker = self._workers[meta(pod)["uid"]] = PodWorker(pod, self._node, folder, address)
        delay = self._timing.start + self._start_delay(pod)
        self._registry.clock.call_later(delay, worker.begin)

    def _stop(self, uid: str, pod: Json) -> None:
        worker = self._workers.get(uid)
        found = self._registry.store.get(PODS, *key_of(pod))
        if found is None or meta(found)["uid"] != uid:
            return
        if worker is None or is_ended(found):
            self._finish(found)
        else:
            worker.stop(_grace(found))

    def _finish(self, pod: Json) -> None:
        """Everything of the pod is over: the last deletion, without grace."""
        found = self._registry.store.get(PODS, *key_of(pod))
        if found is None or meta(found)["uid"] != meta(pod)["uid"]:
            return
        if _grace(found):
            self._registry.delete(PODS, *key_of(pod), DeleteOptions(grace=0, uid=meta(pod)["uid"]))

    # -- containers

    def _start(self, pod: Json, run: Run, on_exit: Callable[[int], None]) -> Body:
        if not self._processes:
            return Puppet(on_exit, deaf=IGNORES_SIGTERM in annotations_of(pod))
        namespace = meta(pod)["namespace"]

        def lookup(kind: Kind, name: str) -> Json | None:
            return self._registry.store.get(kind, namespace, name)

        pod = self._registry.store.get(PODS, *key_of(pod)) or pod
        address = self._workers[meta(pod)["uid"]].address
        pod = {**pod, "status": {**pod["status"], "podIP": address, "hostIP": "127.0.0.1"}}
        run.folder.mkdir(parents=True, exist_ok=True)
        mounted = mounts(pod, run.spec, run.folder, lookup)
        variables = environment.variables(pod, run.spec, lookup)
        given = {name: mounted.path(value) for name, value in variables.items()}
        command = environment.command(run.spec, list(self._images.get(run.spec["image"], ())), variables)
        argv = [self._with_own_files(mounted.path(word), run.folder) for word in command]
        home = run.folder / "home"
        home.mkdir(exist_ok=True)
        env = _passed_on()
        if self._warden is None:
            self._warden = Warden(f"{CLUSTER_MARK}={self._name}", env)
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"
        env |= {"HOME": str(home), "HOSTNAME": pod["spec"].get("hostname") or meta(pod)["name"]}
        env |= {**self._env, **given, MESSAGE_FILE: str(run.message_file())}
        env |= {CLUSTER_MARK: self._name, MARK: run.id}
        folder = Path(mounted.path(run.spec.get("workingDir") or str(home)))
        run.env, run.cwd, run.place = env, folder, mounted.path
        return Process(argv, env, folder, run.log(), on_exit)

    def _with_own_files(self, word: str, folder: Path) -> str:
        for path in self._own_files:
            word = word.replace(path, f"{folder}/own-{Path(path).name}")
        return word

    def running(self, pod: Json, container: str) -> Run:
        """A container that runs; else `LookupError`, in the words of a kubelet."""
        if pod["spec"].get("nodeName") in self._lost:
            raise LookupError("error dialing backend: dial tcp: connect: no route to host")
        worker = self._workers.get(meta(pod)["uid"])
        run = worker.run_of(container) if worker is not None else None
        if run is None or run.body is None:
            raise LookupError(f'unable to upgrade connection: container not found ("{container}")')
        return run

    def execute(self, run: Run, argv: Sequence[str], *, stdin: bool) -> Command:
        """Start a command in a container that runs. `OSError` if there is no such program."""
        if not isinstance(run.body, Process):
            raise FileNotFoundError(2, "this cluster runs no processes", argv[0])
        placed = [self._with_own_files(run.place(word), run.folder) for word in argv]
        command = Command(placed, run.env, run.cwd, run.commands.discard, stdin=stdin)
        run.commands.add(command)
        return command

    def log_path(self, pod: Json, container: str, *, previous: bool) -> Path | None:
        """The file of a container's output; None if there is none yet, or none before."""
        if pod["spec"].get("nodeName") in self._lost:
            raise ApiError(500, "InternalError", f"Get log of {meta(pod)['name']}: dial tcp: connect: no route to host")
        worker = self._workers.get(meta(pod)["uid"])
        run = worker.run_of(container) if worker is not None else None
        if run is None or not run.started or (previous and run.restarts == 0):
            return None
        return run.log(run.restarts - 1 if previous else run.restarts)

    def is_writing(self, pod: Json, container: str) -> bool:
        worker = self._workers.get(meta(pod)["uid"])
        run = worker.run_of(container) if worker is not None else None
        return run is not None and "terminated" not in run.state

    # -- what tests do

    def run_of(self, pod: Json, container: str | None) -> Run:
        """The container of a pod, running or not."""
        worker = self._workers.get(meta(pod)["uid"])
        name = container or pod["spec"]["containers"][0]["name"]
        run = worker.run_of(name) if worker is not None else None
        if run is None:
            raise LookupError(f"pod {meta(pod)['name']} has no container {name} on a node")
        return run

    def end(self, pod: Json, code: int, *, container: str | None = None, log: str = "", oom: bool = False) -> None:
        """End a container that has no process."""
        run = self.run_of(pod, container)
        if not isinstance(run.body, Puppet):
            raise LookupError(f"container {run.name} of {meta(pod)['name']} is not running without a process")
        run.oom = oom
        if log:
            run.folder.mkdir(parents=True, exist_ok=True)
            run.log().write_text(log)
        run.body.end(code)

    def oom_kill(self, pod: Json, *, container: str | None = None, child_only: bool = False) -> None:
        """The kernel kills the container, or only a child: then the container goes on, and is marked at its end."""
        run = self.run_of(pod, container)
        run.oom = True
        if not child_only and run.body is not None:
            run.body.kill()

    def evict(self, pod: Json, message: str = "The node was low on resource: memory.") -> None:
        """As a node under pressure does."""
        condition = {"type": "DisruptionTarget", "reason": "TerminationByKubelet"}
        worker = self._workers.get(meta(pod)["uid"])
        if worker is not None:
            worker.evict("Evicted", message, condition)

    def evict_by_api(self, pod: Json, grace: int | None) -> None:
        """As `kubectl drain` does: marked as a disruption, then deleted."""
        message = "Eviction API: evicting"
        self.disrupt(pod, "EvictionByEvictionAPI", message)
        self._registry.delete(PODS, *key_of(pod), DeleteOptions(grace=grace))

    def disrupt(self, pod: Json, reason: str, message: str) -> None:
        """Say on the pod that it is not its own fault."""

        def edit(new: Json) -> None:
            now = self._registry.clock.stamp()
            set_condition(new.setdefault("status", {}), now, "DisruptionTarget", "True", reason=reason, message=message)

        self._registry.change(PODS, pod, edit)

    def lose(self, node: str) -> None:
        """The node is gone with everything on it, and says nothing any more."""
        self._lost.add(node)
        for worker in list(self._workers.values()):
            if worker.pod["spec"].get("nodeName") == node:
                worker.vanish()

    def cut(self, node: str) -> None:
        """The node does not reach the API server any more; what runs on it goes on."""
        self._lost.add(node)

    def rejoin(self, node: str) -> None:
        """A node that was cut off reaches the API server again."""
        self._lost.discard(node)

    def is_lost(self, node: str) -> bool:
        return node in self._lost

    def find_again(self, node: str) -> None:
        """The node is back after a reboot: its containers are over, and so it says."""
        self._lost.discard(node)
        for worker in list(self._workers.values()):
            pod = self._registry.store.get(PODS, *key_of(worker.pod))
            if pod is None or pod["spec"].get("nodeName") != node:
                continue

            def rebooted(new: Json) -> None:
                new["status"]["phase"] = "Failed"
                for status in new["status"].get("containerStatuses") or []:
                    if "terminated" not in status["state"]:
                        status["state"] = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}

            if not is_ended(pod):
                self._registry.change(PODS, pod, rebooted)
            if is_deleting(pod):
                self._finish(pod)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.vanish()
        self._workers.clear()
        if self._warden is not None:
            self._warden.close()


def _passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _grace(pod: Json) -> int:
    return int(meta(pod).get("deletionGracePeriodSeconds") or 0)
