"""The cluster as one object: an API server with its controllers, in a thread of its own."""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from basilica_testkube.api import Api
from basilica_testkube.clock import ClusterClock
from basilica_testkube.definitions import DefinitionController
from basilica_testkube.deployments import DeploymentController
from basilica_testkube.errors import ApiError, too_old
from basilica_testkube.events import Events
from basilica_testkube.garbage import GarbageCollector
from basilica_testkube.http import HttpServer
from basilica_testkube.jobs import JobController
from basilica_testkube.kinds import NAMESPACES, PODS, Kind, KindTable
from basilica_testkube.kubelet import Kubelet
from basilica_testkube.nodes import NodeController, NodeSpec, Scheduler
from basilica_testkube.registry import Registry
from basilica_testkube.schema import newest
from basilica_testkube.services import ServiceProxy
from basilica_testkube.store import Store
from basilica_testkube.timing import Timing
from basilica_testkube.traffic import Fault, Requests
from basilica_testkube.values import Json, copied

T = TypeVar("T")
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_LOOK_EVERY_S = 0.005


class KubeServer:
    """A small Kubernetes on the loopback address. `with KubeServer() as kube:` and nothing of it is left afterwards.

    Every method may be called from any thread; what it does has been done when it returns.
    """

    def __init__(
        self,
        *,
        processes: bool = True,
        version: str | None = None,
        nodes: Sequence[NodeSpec] = (NodeSpec("node-0"),),
        images: Mapping[str, Sequence[str]] | None = None,
        env: Mapping[str, str] | None = None,
        own_files: Sequence[str] = (),
        start_delay: Callable[[Json], float] = lambda pod: 0.0,
        timing: Timing | None = None,
        speed: float = 1.0,
        history: int = 50_000,
        users: Mapping[str, str] | None = None,
    ) -> None:
        """`processes=False`: pods run nothing, and end when `end_container` says so.

        `version`: of Kubernetes, for the schemas. `images`: the commands of images, for containers that bring none.
        `env`: variables for every container. `own_files`: paths that mean another file in each container, wherever its
        command names them; all others are this machine's. `speed`: of the cluster's time; 0 stands still until
        `advance`. `history`: how many changes of a kind a watch can go back.
        `users`: by their tokens, whom roles and bindings are enforced for; all others may do everything.
        """
        self._users = users or {}
        self._settings = (processes, images or {}, env or {}, tuple(own_files), start_delay)
        self._version, self._nodes_wanted = version or newest(), tuple(nodes)
        self._timing, self._speed, self._history = timing or Timing(), speed, history
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="basilica-testkube", daemon=True)

    # -- its life

    def start(self) -> Self:
        self._thread.start()
        self._folder = tempfile.TemporaryDirectory(prefix="testkube-")
        self._do(self._build)
        asyncio.run_coroutine_threadsafe(self._http.listen(), self._loop).result()
        return self

    def close(self) -> None:
        """End every process and connection. May be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._http.close(), self._loop).result()
        asyncio.run_coroutine_threadsafe(self._services.close(), self._loop).result()
        self._do(self._kubelet.close)
        self._do(self._clock.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        processes, images, env, own_files, start_delay = self._settings
        self._clock = ClusterClock(self._speed)
        store = Store(self._history)
        self._registry = Registry(store, self._clock, KindTable(), self._version)
        events = Events(self._registry, self._timing)
        GarbageCollector(self._registry, self._timing)
        DefinitionController(self._registry)
        self._kubelet = Kubelet(
            self._registry,
            self._timing,
            events,
            folder=Path(self._folder.name),
            processes=processes,
            images=images,
            env=env,
            own_files=own_files,
            start_delay=start_delay,
        )
        JobController(self._registry, self._timing, events)
        DeploymentController(self._registry, self._timing)
        self._services = ServiceProxy(self._registry)
        Scheduler(self._registry, self._timing, events)
        self._nodes = NodeController(self._registry, self._timing, self._kubelet, events)
        self._api = Api(self._registry, self._kubelet, self._timing, self._users)
        self._http = HttpServer(self._api.answer)
        for name in _NAMESPACES:
            self._registry.create(NAMESPACES, "", {"metadata": {"name": name}})
        for node in self._nodes_wanted:
            self._nodes.add(node)

    def _do(self, action: Callable[[], T]) -> T:
        """Do something in the cluster's own thread."""

        async def do() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    # -- reaching it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.port}"

    def configuration(self) -> Any:
        """A `kubernetes.client.Configuration` for the official client."""
        from kubernetes.client import Configuration  # noqa: PLC0415 - only who wants the client needs it

        configuration = Configuration()
        configuration.host = self.url
        return configuration

    def api_client(self) -> Any:
        """A `kubernetes.client.ApiClient`, which the caller closes."""
        from kubernetes.client import ApiClient  # noqa: PLC0415

        return ApiClient(self.configuration())

    def kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """Write a kubeconfig with this cluster as the current context."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "anyone"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        }
        path.write_text(json.dumps(content))
        return path

    @property
    def requests(self) -> Requests:
        """What was asked of the API over HTTP so far."""
        return self._api.requests

    # -- looking, and writing without HTTP

    def objects(self, plural: str, namespace: str = "", group: str | None = None) -> list[Json]:
        """The objects of a resource; no request is counted."""
        kind = self._kind(plural, group)
        return self._do(lambda: [copied(obj) for obj in self._registry.store.items(kind, namespace)])

    def get(self, plural: str, name: str, namespace: str = "default", group: str | None = None) -> Json | None:
        kind = self._kind(plural, group)
        where = namespace if kind.namespaced else ""
        found = self._do(lambda: self._registry.store.get(kind, where, name))
        return None if found is None else {**copied(found)}

    def create(self, obj: Json, namespace: str = "default") -> Json:
        """Create an object from its manifest."""
        kind = self._do(lambda: self._registry.kinds.of_object(obj["apiVersion"], obj["kind"]))
        if kind is None:
            raise LookupError(f"the cluster has no kind {obj['kind']} in {obj['apiVersion']}")
        where = obj["metadata"].get("namespace", namespace) if kind.namespaced else ""
        return self._do(lambda: copied(self._registry.create(kind, where, obj)))

    def wait_for(self, condition: Callable[[], T | None], timeout: float = 30.0) -> T:
        """Look until `condition` gives something true, and return it."""
        end = time.monotonic() + timeout
        while not (found := condition()):
            if time.monotonic() > end:
                raise TimeoutError(f"after {timeout:g} s there was still no {condition}")
            time.sleep(_LOOK_EVERY_S)
        return found

    def pods(self, job: str | None = None, namespace: str = "default") -> list[Json]:
        """Pods, of one Job if named, by completion index."""
        found = self.objects("pods", namespace)
        if job is not None:
            found = [pod for pod in found if (pod["metadata"].get("labels") or {}).get("job-name") == job]
        return sorted(found, key=_rank)

    def _kind(self, plural: str, group: str | None) -> Kind:
        kinds = self._do(self._registry.kinds.all)
        for kind in kinds:
            if kind.plural == plural and group in (None, kind.group):
                return kind
        raise LookupError(f"the cluster has no resource {plural!r}")

    def _pod(self, name: str, namespace: str) -> Json:
        return self._registry.get(PODS, namespace, name)

    # -- time

    @property
    def now(self) -> float:
        return self._clock.now()

    def advance(self, seconds: float) -> None:
        """Let cluster time pass at once: back-offs, deadlines, lifetimes."""
        self._do(lambda: self._clock.advance(seconds))

    # -- pods

    def end_container(
        self,
        pod: str,
        exit_code: int = 0,
        *,
        log: str = "",
        oom: bool = False,
        container: str | None = None,
        namespace: str = "default",
    ) -> None:
        """With `processes=False`: the container ends, having said `log`."""
        end = self._kubelet.end
        self._do(lambda: end(self._pod(pod, namespace), exit_code, container=container, log=log, oom=oom))

    def end_containers(self, pods: Iterable[str], exit_code: int = 0, *, namespace: str = "default") -> None:
        """With `processes=False`: the containers of many pods end, all at one moment."""

        def end_all() -> None:
            for pod in pods:
                self._kubelet.end(self._pod(pod, namespace), exit_code)

        self._do(end_all)

    def oom_kill(
        self, pod: str, *, child_only: bool = False, container: str | None = None, namespace: str = "default"
    ) -> None:
        """The kernel kills the container for its memory: 137, OOMKilled. A child alone: the reason, another code."""
        kill = self._kubelet.oom_kill
        self._do(lambda: kill(self._pod(pod, namespace), container=container, child_only=child_only))

    def evict(self, pod: str, *, namespace: str = "default") -> None:
        """The node is short of memory and ends the pod."""
        self._do(lambda: self._kubelet.evict(self._pod(pod, namespace)))

    # -- nodes

    def add_node(self, node: NodeSpec) -> None:
        self._do(lambda: self._nodes.add(node))

    def lose_node(self, name: str) -> None:
        """The machine dies. The cluster notices in its own time."""
        self._do(lambda: self._nodes.lose(name))

    def cut_node(self, name: str) -> None:
        """The machine does not reach the API server any more; its pods go on."""
        self._do(lambda: self._nodes.cut(name))

    def rejoin_node(self, name: str) -> None:
        """A machine that was cut off reaches the API server again."""
        self._do(lambda: self._nodes.rejoin(name))

    def find_node(self, name: str) -> None:
        """The machine is back, after a reboot."""
        self._do(lambda: self._nodes.find_again(name))

    # -- faults

    def fail(
        self, verb: str = "*", resource: str = "*", *, status: int, times: int = 1, retry_after: int | None = None
    ) -> None:
        """Answer the next requests of that kind with an error; status 0 cuts the connection instead."""
        self._do(lambda: self._api.faults.append(Fault(verb, resource, status, times, retry_after)))

    def heal(self) -> None:
        """Answer as usual again, whatever `fail` was told."""
        self._do(self._api.faults.clear)

    def cut_watches(self, resource: str | None = None) -> int:
        """Cut the connections of open watches; returns how many."""
        return self._do(lambda: self._end_watches(resource, None))

    def expire_watches(self, resource: str | None = None) -> int:
        """Tell open watches that their version is too old: an ERROR event with 410, and the end."""
        return self._do(lambda: self._end_watches(resource, too_old(1, self._registry.store.revision)))

    def _end_watches(self, resource: str | None, error: ApiError | None) -> int:
        found = [watch for watch in self._api.listings.watches if resource in (None, watch.resource)]
        for watch in found:
            watch.end(error)
        return len(found)

    def compact(self) -> None:
        """Forget the history of all objects: no watch or list can go on from an older version."""

        def compact() -> None:
            self._registry.store.compact()
            self._api.listings.forget_pages()

        self._do(compact)

    def bookmark_every(self, seconds: float) -> None:
        """How often a watch that wants bookmarks gets one, in real seconds."""

        def change() -> None:
            self._api.listings.bookmark_every = seconds

        self._do(change)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The API server is away; the cluster goes on."""
        asyncio.run_coroutine_threadsafe(self._http.close(), self._loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._http.listen(), self._loop).result()


def _rank(pod: Json) -> tuple[int, str]:
    index = (pod["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "-1")
    return int(index), pod["metadata"]["name"]
