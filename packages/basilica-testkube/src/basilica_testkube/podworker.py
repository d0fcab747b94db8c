"""The life of one pod on its node."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from basilica_testkube.clock import ClusterClock, Timer
from basilica_testkube.environment import ConfigError
from basilica_testkube.processes import Body, Command
from basilica_testkube.timing import Timing
from basilica_testkube.values import Json, meta, set_condition

Starter = Callable[[Json, "Run", Callable[[int], None]], Body]
PULL_FAILS = "pull-fails/"  # images that begin so cannot be pulled
_CONFIG_RETRY_S = 5.0
_FILE_LIMIT, _MESSAGE_LIMIT = 4096, 2048  # of a message that the container wrote, and of the end of its log


@dataclass(slots=True)
class Run:
    """One container of the pod, through all its restarts."""

    spec: Json
    init: bool
    folder: Path
    restarts: int = 0
    body: Body | None = None
    env: dict[str, str] = field(default_factory=dict)  # of its process
    cwd: Path = Path("/")
    place: Callable[[str], str] = str  # where a path of the container is on this machine
    commands: set[Command] = field(default_factory=set)  # that were started in it
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last: Json = field(default_factory=dict)
    started: bool = False  # at least once: there is a log
    oom: bool = False
    ended_at: float = 0.0
    id: str = ""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    def log(self, restart: int | None = None) -> Path:
        return self.folder / f"{self.name}-{self.restarts if restart is None else restart}.log"

    def message_file(self) -> Path:
        return self.folder / f"{self.name}-{self.restarts}.message"

    @property
    def exit_code(self) -> int | None:
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    def status(self) -> Json:
        running = "running" in self.state
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "",
            "ready": running or (self.init and self.exit_code == 0),
            "started": running,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        } | ({"containerID": f"process://{self.id}"} if self.id else {})


@dataclass(frozen=True, slots=True)
class Node:
    """What a worker asks of the node it is on."""

    clock: ClusterClock
    timing: Timing
    start: Starter
    write: Callable[[Json, Callable[[Json], None]], Json | None]  # edit the pod
    finish: Callable[[Json], None]  # the pod is to leave the API
    tell: Callable[..., None]  # an event about the pod


class PodWorker:
    """Starts the containers of a pod in order, restarts them, stops them, and reports what it sees, a little late."""

    def __init__(self, pod: Json, node: Node, folder: Path, address: str) -> None:
        self.pod, self._node, self.address = pod, node, address
        spec = pod["spec"]
        self.runs = [Run(c, init=True, folder=folder) for c in spec.get("initContainers") or []]
        self.runs += [Run(c, init=False, folder=folder) for c in spec["containers"]]
        self._policy = spec["restartPolicy"]
        self._stopping = False
        self._gone = False
        self._ending: Json | None = None  # why the pod as a whole is Failed, whatever its containers say
        self._deadline: Timer | None = None

    def run_of(self, name: str) -> Run | None:
        return next((run for run in self.runs if run.name == name), None)

    # -- starting

    def begin(self) -> None:
        if self._gone or self._stopping:
            return
        unpullable = [run for run in self.runs if run.spec["image"].startswith(PULL_FAILS)]
        if unpullable:
            self._cannot_pull(unpullable, "ErrImagePull")
            return
        self._start_next()

    def _cannot_pull(self, runs: list[Run], reason: str) -> None:
        if self._gone or self._stopping:
            return
        for run in self.runs:
            run.state = {"waiting": {"reason": "ContainerCreating"}}
        for run in runs:
            image = run.spec["image"]
            text = f'failed to pull and unpack image "{image}": not found'
            if reason == "ImagePullBackOff":
                text = f'Back-off pulling image "{image}": ErrImagePull: {text}'
            run.state = {"waiting": {"reason": reason, "message": text}}
            self._node.tell(self.pod, "Warning", "Failed", text)
        self._report("Pending")
        if reason == "ErrImagePull":
            delay = self._node.timing.image_backoff
            self._node.clock.call_later(delay, lambda: self._cannot_pull(runs, "ImagePullBackOff"))

    def _start_next(self) -> None:
        """Init containers one after the other, then all the others."""
        waiting = next((run for run in self.runs if run.init and run.exit_code != 0), None)
        if waiting is not None:
            self._start(waiting)
            self._report("Pending")
            return
        for run in self.runs:
            if not run.init and "waiting" in run.state:
                self._start(run)
        self._report("Running")

    def _start(self, run: Run) -> None:
        run.id = uuid.uuid4().hex
        run.oom = False
        try:
            run.body = self._node.start(self.pod, run, lambda code: self._ended(run, code))
        except ConfigError as error:
            run.state = {"waiting": {"reason": error.reason, "message": str(error)}}
            self._node.clock.call_later(_CONFIG_RETRY_S, lambda: self._start_again(run))
            return
        except OSError as error:
            message = f'failed to create containerd task: exec: "{error.filename}": {error.strerror}'
            run.started = True
            self._node.clock.call_later(0, lambda: self._see(run, 128, "StartError", message))
        run.started = True
        run.state = {"running": {"startedAt": self._node.clock.stamp()}}

    def _start_again(self, run: Run) -> None:
        if not (self._gone or self._stopping) and "waiting" in run.state:
            self._start(run)
            self._report("Pending" if run.init else "Running")

    # -- ending

    def _ended(self, run: Run, code: int) -> None:
        """The container's process is over; the world hears of it a little later."""
        if self._gone:
            return
        run.body = None
        run.ended_at = self._node.clock.now()
        reason = "OOMKilled" if run.oom else "Completed" if code == 0 else "Error"
        self._node.clock.call_later(self._node.timing.container_status, lambda: self._see(run, code, reason, ""))

    def _see(self, run: Run, code: int, reason: str, message: str) -> None:
        if self._gone:
            return
        started = run.state.get("running", {}).get("startedAt", self._node.clock.stamp())
        finished = self._node.clock.stamp(run.ended_at or None)
        ended = {
            "exitCode": code,
            "reason": reason,
            "startedAt": started,
            "finishedAt": finished,
            "containerID": f"process://{run.id}",
        }
        message = message or self._last_words(run, code)
        run.state = {"terminated": ended | ({"message": message} if message else {})}
        phase = "Pending" if run.init else "Running"
        if run.init and code == 0 and not self._stopping:
            self._report(phase)
            self._start_next()
        elif self._restarts(code):
            self._report(phase)
            self._back_off(run)
        else:
            self._report(phase)
            self._maybe_over(run)

    def _restarts(self, code: int) -> bool:
        if self._stopping or self._ending is not None:
            return False
        return self._policy == "Always" or (self._policy == "OnFailure" and code != 0)

    def _back_off(self, run: Run) -> None:
        timing = self._node.timing
        delay = (
            0.0
            if run.restarts == 0
            else min(timing.restart_backoff * 2 ** (run.restarts - 1), timing.container_backoff_max)
        )
        run.last = run.state
        if delay:
            text = f"back-off {delay:.0f}s restarting failed container={run.name}"
            run.state = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
            self._report("Pending" if run.init else "Running")
        self._node.clock.call_later(delay, lambda: self._restart(run))

    def _restart(self, run: Run) -> None:
        if self._gone or self._stopping or self._ending is not None:
            return
        run.restarts += 1
        self._start(run)
        self._report("Pending" if run.init else "Running")

    def _maybe_over(self, run: Run) -> None:
        mains = [each for each in self.runs if not each.init]
        failed_early = run.init and run.exit_code != 0
        if not failed_early and not self._stopping and any(each.exit_code is None for each in mains):
            return
        if any(each.body is not None for each in self.runs) or any("running" in each.state for each in self.runs):
            return
        self._node.clock.call_later(self._node.timing.phase, self._over)

    def _over(self) -> None:
        if self._gone:
            return
        good = all(run.exit_code == 0 for run in self.runs) and self._ending is None
        self._report("Succeeded" if good else "Failed")
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stopping:
            self._node.finish(self.pod)

    def _last_words(self, run: Run, code: int) -> str:
        file = run.message_file()
        text = file.read_bytes()[:_FILE_LIMIT] if file.exists() else b""
        if (
            not text
            and code != 0
            and run.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
            and run.log().exists()
        ):
            text = b"".join(run.log().read_bytes().splitlines(keepends=True)[-80:])[-_MESSAGE_LIMIT:]
        return text.decode(errors="replace")

    # -- orders

    def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL when the grace is over; a second order may only shorten it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._node.clock.call_later(grace, self._kill)
        if self._stopping:
            return
        self._stopping = True
        alive = [run for run in self.runs if run.body is not None]
        for run in alive:
            assert run.body is not None
            run.body.terminate()
        if not alive and not any("running" in run.state for run in self.runs):
            self._node.clock.call_later(self._node.timing.phase, self._over)

    def _kill(self) -> None:
        for run in self.runs:
            if run.body is not None:
                run.body.kill()

    def evict(self, reason: str, message: str, condition: Json) -> None:
        """End the pod as a node under pressure does: Failed, and it stays to be read."""
        self._ending = {"reason": reason, "message": message, "condition": condition}
        alive = any(run.body is not None for run in self.runs)
        self._kill()
        if not alive:
            self._node.clock.call_later(self._node.timing.phase, self._over)

    def vanish(self) -> None:
        """The node is gone: nothing runs any more, and nobody reports it."""
        self._gone = True
        for run in self.runs:
            if run.body is not None:
                run.body.abandon()
                run.body = None
            for command in tuple(run.commands):
                command.abandon()

    # -- reporting

    def _report(self, phase: str) -> None:
        def edit(pod: Json) -> None:
            status = pod.setdefault("status", {})
            now = self._node.clock.stamp()
            status["phase"] = phase
            status.setdefault("startTime", now)
            status |= {"hostIP": "127.0.0.1", "podIP": self.address, "podIPs": [{"ip": self.address}]}
            status["containerStatuses"] = [run.status() for run in self.runs if not run.init]
            if any(run.init for run in self.runs):
                status["initContainerStatuses"] = [run.status() for run in self.runs if run.init]
            self._set_conditions(status, now, phase)

        written = self._node.write(self.pod, edit)
        if written is not None:
            self.pod = written

    def _set_conditions(self, status: Json, now: str, phase: str) -> None:
        running = [run for run in self.runs if not run.init and "running" in run.state]
        ready = phase == "Running" and len(running) == sum(not run.init for run in self.runs)
        initialized = phase != "Pending" or not any(run.init for run in self.runs)
        over = "PodCompleted" if phase == "Succeeded" else "PodFailed" if phase == "Failed" else ""
        why = "" if ready else over or "ContainersNotReady"
        set_condition(status, now, "Initialized", str(initialized))
        set_condition(status, now, "ContainersReady", str(ready), reason=why)
        set_condition(status, now, "Ready", str(ready), reason=why)
        if self._ending is not None:
            status |= {"reason": self._ending["reason"], "message": self._ending["message"]}
            found = self._ending["condition"]
            set_condition(status, now, found["type"], "True", reason=found["reason"], message=self._ending["message"])

    def __repr__(self) -> str:
        return f"PodWorker({meta(self.pod)['name']})"
