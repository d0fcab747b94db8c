"""Replicas as one Indexed Job of Kubernetes: EKS, or any other cluster.

One object is the gang: the completion index is the rank, and one deletion ends all of it. The number of requests to the
API server does not grow with the ranks: `collect` watches all pods at once, and reads the Job when a rank has failed.
"""

import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import Any

from basilica.executors.arguments import (
    allow_unknown_handle,
    check_launch,
    check_lines,
    check_run_id,
    check_seconds,
    check_timeout,
    named_in,
    new_gang_name,
)
from basilica.executors.eks.calls import Calls, is_transient, retry_after, status_of
from basilica.executors.eks.evidence import CONTAINER, GangEvidence, rank_of, waits_for
from basilica.executors.eks.follow import FIRST_PAUSE_SECONDS, READ_JOB_SECONDS, WATCH_SECONDS, Following, Place
from basilica.executors.environment import RENDEZVOUS_URI, replica_environment
from basilica.executors.launch import gang_handles, replica_command
from basilica.executors.outcomes import Changes, Outcome, placeholder, replica_result
from basilica.executors.protocol import (
    LAUNCH_SECONDS,
    LOG_LINES,
    Entrypoint,
    OnChange,
    ReplicaHandle,
    ReplicaResult,
)
from basilica.executors.results import add_stored_results
from basilica.kube.manifests.gang import QUEUE_NAME, Container, Gang, gpu_placement, indexed_job
from basilica.version import pip_install

APP = "basilica"
CREATE_ATTEMPTS = 4
SANDBOXES = ("gvisor", "runsc", "kata")

_RUN_ID = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")


class EKSExecutor:
    """Replicas as the pods of one Indexed Job.

    `image` must contain Python, basilica and the entrypoint's module, unless `command` names another program.
    `service_account_name` and `runtime_class_name` refer to existing objects: nothing of IAM is created.
    `queue_name` is a queue of Kueue, which admits all ranks or none. `start_seconds`: `collect` gives up a gang if some
    ranks have not run by then, counted from its launch, or from the first `collect` in another process.
    Clients are built on first use, unless given: in the cluster from its service account, else from kubeconfig.
    """

    backend_name = "eks"
    supports_inter_replica_network = False

    def __init__(
        self,
        image: str,
        *,
        namespace: str = "default",
        service_account_name: str | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Any] | None = None,
        runtime_class_name: str | None = None,
        command: Sequence[str] | None = None,
        cpu_request: str = "4",
        memory_request: str = "16Gi",
        ttl_seconds_after_finished: int = 3600,
        backoff_limit: int = 0,
        gpu_resource_key: str = "nvidia.com/gpu",
        run_id: str | None = None,
        queue_name: str | None = None,
        start_seconds: float | None = None,
        batch_api: Any = None,
        core_api: Any = None,
    ) -> None:
        if batch_api is None or core_api is None:
            try:
                import kubernetes  # noqa: F401, PLC0415  each optional package is loaded by its executor
            except ImportError:
                raise RuntimeError(f"EKSExecutor needs the kubernetes package: {pip_install('kubernetes')}") from None
        if start_seconds is not None:
            check_seconds("start_seconds", start_seconds)
        self._run_id = check_run_id(run_id, _RUN_ID, "Kubernetes takes lower-case letters, digits and '-' inside")
        self._image, self._namespace = image, namespace
        self._service_account, self._runtime_class = service_account_name, runtime_class_name
        self._node_selector, self._gpu_key = node_selector, gpu_resource_key
        self._tolerations = None if tolerations is None else [_toleration(each) for each in tolerations]
        self._command = list(command or replica_command())
        self._requests = {"cpu": cpu_request, "memory": memory_request}
        self._ttl, self._backoff_limit = ttl_seconds_after_finished, backoff_limit
        self._queue, self._start_seconds = queue_name, start_seconds
        self._given = (batch_api, core_api)
        self._calls_made: Calls | None = None
        self._own_client: Any = None
        self._gangs: dict[Place, GangEvidence] = {}
        self._guard = Lock()

    # ---- the protocol --------------------------------------------------------------------------------------------

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = LAUNCH_SECONDS,
    ) -> list[ReplicaHandle]:
        """Create the Job. `gpu`: A100, H100, A10G or T4 select a kind of node; any other name, one GPU of any kind."""
        check_launch(n_replicas, entrypoint, entrypoint_args, timeout, callables=False)
        name = new_gang_name(self._run_id)
        manifest = self._manifest(name, n_replicas, str(entrypoint), entrypoint_args, gpu=gpu, timeout=timeout)
        self._create(manifest)
        self._gang(Place(self._namespace, name)).since = time.monotonic()
        shared = {
            "job_name": name,
            "namespace": self._namespace,
            RENDEZVOUS_URI: entrypoint_args.get(RENDEZVOUS_URI),
        }
        return gang_handles(self.backend_name, n_replicas, shared)

    def poll(self, handle: ReplicaHandle) -> str:
        place = self._place(handle)
        gang = self._gang(place)
        if not gang.over(handle.rank):
            gang.see_job(self._calls().read_job(place.namespace, place.job_name))
        return gang.polled_status(handle.rank)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        """Return the last lines of the rank's latest pod, or the kept lines if the pod has been removed."""
        check_lines(n_lines)
        place = self._place(handle)
        gang = self._gang(place)
        kept = "".join(gang.last_lines(handle.rank).splitlines(keepends=True)[-n_lines:])
        pod = self._pod_of(place, handle.rank)
        if pod is None:
            may_be_refused = not kept and handle.rank not in gang.ever_there
            refusal = self._calls().read_refusal(place.namespace, place.job_name) if may_be_refused else ""
            return kept or placeholder(handle.rank, "job not found / no pods yet", refusal)
        try:
            text = self._calls().read_log(place.namespace, str(pod["metadata"]["name"]), n_lines)
        except Exception as error:
            if status_of(error) not in (400, 404):
                raise
            text = ""
        return text or kept or placeholder(handle.rank, "pod not started / no logs yet", waits_for(pod))

    def cancel(self, handle: ReplicaHandle) -> None:
        """Delete the Job, which ends the whole gang. Every error but "not found" and "conflict" is raised."""
        with allow_unknown_handle():
            place = self._place(handle)
            try:
                self._calls().delete_job(place.namespace, place.job_name)
            except Exception as error:
                if status_of(error) not in (404, 409):
                    raise

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until every rank has ended; `timeout=None` waits a day. The results of a failed gang name the rank that
        failed first, and the ranks that were stopped because of it."""
        seconds = check_timeout(timeout)
        deadline = time.monotonic() + seconds
        places: dict[Place, list[int]] = {}
        for number, handle in enumerate(handles):
            places.setdefault(self._place(handle), []).append(number)
        changes, notifying, stop = Changes(on_change), Lock(), Event()

        def follow(place: Place, numbers: list[int]) -> None:
            gang = self._gang(place)
            mine: dict[int, list[int]] = {}
            for number in numbers:
                mine.setdefault(handles[number].rank, []).append(number)

            def notify(rank: int) -> None:
                with notifying:
                    for number in mine[rank]:
                        changes.notify(number, handles[number], gang.status(rank))

            following = Following(self._calls().until(deadline), place, gang, notify, stop)
            longest = WATCH_SECONDS if len(places) == 1 else READ_JOB_SECONDS
            try:
                following.follow(set(mine), deadline, start_seconds=self._start_seconds, longest=longest)
            except BaseException:
                stop.set()  # the error is raised soon, not when the other gangs have ended
                raise

        if len(places) == 1:
            follow(*next(iter(places.items())))
        elif places:
            with ThreadPoolExecutor(len(places)) as threads:
                try:
                    list(threads.map(follow, places.keys(), places.values()))
                except BaseException:
                    stop.set()
                    raise
        return self._results(handles, seconds)

    def close(self) -> None:
        """Close the connections of a client that was built here. Launched gangs continue."""
        with self._guard:
            client, self._own_client = self._own_client, None
            if client is not None:
                self._calls_made = None
                client.close()

    # ---- the Job -------------------------------------------------------------------------------------------------

    def _manifest(
        self, name: str, size: int, entrypoint: str, arguments: Mapping[str, Any], *, gpu: str | None, timeout: float
    ) -> dict[str, Any]:
        if gpu is not None and any(word in (self._runtime_class or "").lower() for word in SANDBOXES):
            warnings.warn(
                f"GPUs in the sandbox {self._runtime_class!r} need a runtime that passes them through: "
                "check that its nodes have one",
                stacklevel=3,
            )
        placement, limits = gpu_placement(
            gpu, node_selector=self._node_selector, tolerations=self._tolerations, resource_key=self._gpu_key
        )
        variables = replica_environment(size, entrypoint, arguments, remote=True) | {"REPLICA_JOB": name}
        return indexed_job(
            Gang(
                name=name,
                namespace=self._namespace,
                size=size,
                labels={"app": APP, "job-name": name},
                job_labels={} if self._queue is None else {QUEUE_NAME: self._queue},
                placement=placement,
                service_account_name=self._service_account,
                runtime_class_name=self._runtime_class,
                job={
                    "backoffLimit": self._backoff_limit,
                    "ttlSecondsAfterFinished": self._ttl,
                    "activeDeadlineSeconds": math.ceil(timeout),
                },
                container=Container(
                    name=CONTAINER,
                    image=self._image,
                    command=self._command,
                    rank_env="REPLICA_RANK",
                    env=variables,
                    requests=self._requests,
                    limits=limits,
                    more={"terminationMessagePolicy": "FallbackToLogsOnError"},  # the last lines outlive the pod
                ),
            )
        )

    def _create(self, manifest: dict[str, Any]) -> None:
        """Create the Job, or delete it after an error: a Job without a handle would run to its deadline."""
        try:
            self._create_once(manifest)
        except BaseException as error:  # Ctrl-C, too
            if not isinstance(error, Exception) or is_transient(error):
                self._remove_unknown(str(manifest["metadata"]["name"]), error)
            raise

    def _remove_unknown(self, name: str, error: BaseException) -> None:
        """Delete a Job that may have been created; if that fails, a note on the error names the Job."""
        try:
            self._calls().delete_job(self._namespace, name)
        except Exception as trouble:  # noqa: BLE001  the first error is the one that counts
            if status_of(trouble) != 404:
                error.add_note(f"the Job {name} may be there all the same, in the namespace {self._namespace}")

    def _create_once(self, manifest: dict[str, Any]) -> None:
        """Create the Job exactly once, even if responses are lost: its name is unique, so a conflict is our own Job."""
        for attempt in range(CREATE_ATTEMPTS):
            try:
                self._calls().create_job(self._namespace, manifest)
            except Exception as error:
                if attempt and status_of(error) == 409:
                    return  # the response to an earlier attempt was lost, the Job exists
                if not is_transient(error) or attempt == CREATE_ATTEMPTS - 1:
                    raise
                time.sleep(retry_after(error) or FIRST_PAUSE_SECONDS * 2**attempt)
            else:
                return

    def _pod_of(self, place: Place, rank: int) -> Mapping[str, Any] | None:
        """Return a rank's latest pod."""
        try:
            pods = self._calls().list_pods(place.namespace, place.job_name, rank)
        except Exception as error:
            if status_of(error) not in (400, 404):
                raise
            return None
        mine = [pod for pod in pods if rank_of(pod, place.job_name) == rank]
        return max(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""), default=None)

    # ---- results -------------------------------------------------------------------------------------------------

    def _results(self, handles: Sequence[ReplicaHandle], seconds: float) -> list[ReplicaResult]:
        results = []
        for handle in handles:
            gang = self._gang(self._place(handle))
            status, code = gang.status(handle.rank), gang.exit_code(handle.rank)
            outcome = Outcome(status, code, gang.error(handle.rank), role=gang.role(handle.rank))
            results.append(replica_result(handle, outcome, seconds))
        add_stored_results(handles, results, gang_key="job_name")
        return results

    # ---- inside --------------------------------------------------------------------------------------------------

    def _place(self, handle: ReplicaHandle) -> Place:
        """Return the gang's place; a handle without a namespace means the executor's own."""
        namespace = named_in(handle, self.backend_name, "namespace", self._namespace)
        return Place(namespace, named_in(handle, self.backend_name, "job_name"))

    def _gang(self, place: Place) -> GangEvidence:
        with self._guard:
            return self._gangs.setdefault(place, GangEvidence(place.job_name))

    def _calls(self) -> Calls:
        with self._guard:
            if self._calls_made is None:
                batch, core = self._given
                if batch is None or core is None:
                    api = self._own_client = _api_client()
                    from kubernetes import client  # noqa: PLC0415

                    batch, core = batch or client.BatchV1Api(api), core or client.CoreV1Api(api)
                self._calls_made = Calls(batch, core)
            return self._calls_made


def _toleration(given: Any) -> dict[str, Any]:
    """Return a toleration as JSON of the API, from a dictionary or a `V1Toleration` of the kubernetes package."""
    if isinstance(given, Mapping):
        return dict(given)
    names = getattr(given, "attribute_map", None)
    if not isinstance(names, Mapping) or not isinstance(given, _model("V1Toleration")):
        raise TypeError(f"tolerations are dictionaries or V1Toleration models, not {given!r}")
    return {wire: value for name, wire in names.items() if (value := getattr(given, name)) is not None}


def _model(name: str) -> type:
    from kubernetes import client  # noqa: PLC0415  a model can only be given where the package is

    model: type = getattr(client, name)
    return model


def _api_client() -> Any:
    """Build a client: in the cluster from its service account, else from kubeconfig."""
    from kubernetes import client, config  # noqa: PLC0415

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)
    return client.ApiClient(configuration)
