"""The Job controller: pods for indexes, counts, failures and ends, in the order the real one does them.

Its status comes late, it forgets indexes that a resize cuts off, and it does nothing for a Job that has finished:
all of that is on purpose.
"""

from collections import defaultdict
from functools import partial

from basilica_testkube import indexes, jobrules
from basilica_testkube.clock import moment_of
from basilica_testkube.errors import ApiError
from basilica_testkube.events import Events
from basilica_testkube.joblook import Look, Memory, is_running, removal_order, set_indexes
from basilica_testkube.jobpods import new_pod
from basilica_testkube.jobrules import INDEX_FAILURES, INDEX_IGNORED, TRACKING, index_of, is_failed, judge
from basilica_testkube.kinds import JOBS, PODS
from basilica_testkube.options import DECODED, DeleteOptions
from basilica_testkube.registry import Registry
from basilica_testkube.store import Change
from basilica_testkube.timing import Timing
from basilica_testkube.values import (
    Json,
    annotations_of,
    condition_of,
    controller_of,
    copied,
    finalizers_of,
    has_condition,
    is_deleting,
    is_ended,
    key_of,
    meta,
    phase_of,
    set_condition,
)

_CREATE_AGAIN_S = 1.0
_PODS_PER_SYNC = 500


class JobController:
    """Looks at a Job a moment after it or one of its pods has changed."""

    def __init__(self, registry: Registry, timing: Timing, events: Events) -> None:
        self._registry, self._timing, self._events = registry, timing, events
        self._clock = registry.clock
        self._pods: dict[str, dict[str, Json]] = defaultdict(dict)  # by the Job's uid, then their own
        self._memories: dict[str, Memory] = {}
        self._due: set[str] = set()
        registry.store.listen(self._note)

    def _note(self, change: Change) -> None:
        obj = change.obj
        if change.kind == JOBS:
            if change.type == "DELETED":
                self._clock.call_later(self._timing.job_sync, partial(self._release_all, meta(obj)["uid"]))
            elif change.type == "ADDED" or change.old is None or change.old["spec"] != obj["spec"] or is_deleting(obj):
                self._soon(obj)
                if change.old is not None and "activeDeadlineSeconds" in obj["spec"]:
                    self._soon(obj, obj["spec"]["activeDeadlineSeconds"] + 1)
        elif change.kind == PODS:
            before = controller_of(change.old) if change.old else None
            owner = controller_of(obj) if change.type != "DELETED" else None
            if before is not None and before["kind"] == "Job" and (owner is None or owner["uid"] != before["uid"]):
                self._pods[before["uid"]].pop(meta(obj)["uid"], None)
                if change.type != "DELETED":
                    self._clock.call_later(self._timing.job_sync, partial(self._release, obj))
            if owner is not None and owner["kind"] == "Job":
                self._pods[owner["uid"]][meta(obj)["uid"]] = obj
            for each in (before, owner):
                if each is not None and each["kind"] == "Job":
                    self._soon_by_uid(each["uid"], meta(obj)["namespace"], each["name"])

    def _soon(self, job: Json, delay: float | None = None) -> None:
        self._soon_by_uid(meta(job)["uid"], *key_of(job), delay=delay)

    def _soon_by_uid(self, uid: str, namespace: str, name: str, *, delay: float | None = None) -> None:
        if delay is not None:
            self._clock.call_later(delay, partial(self._sync, uid, namespace, name))
        elif uid not in self._due:
            self._due.add(uid)
            self._clock.call_later(self._timing.job_sync, partial(self._sync, uid, namespace, name))

    # -- one look

    def _sync(self, uid: str, namespace: str, name: str) -> None:
        self._due.discard(uid)
        job = self._registry.store.get(JOBS, namespace, name)
        if job is None or meta(job)["uid"] != uid:
            self._release_all(uid)
            return
        if is_deleting(job):
            for pod in self._pods_of(uid):
                if is_deleting(pod) or is_ended(pod):
                    self._release(pod)
            return
        if jobrules.finished(job) is not None:
            for pod in self._pods_of(uid):
                if is_ended(pod) or is_deleting(pod):
                    self._release(pod)
            return
        self._look(job)

    def _look(self, job: Json) -> None:
        uid, spec = meta(job)["uid"], job["spec"]
        look = Look(
            job=job,
            pods=self._pods_of(uid),
            status=copied(job.get("status") or {}),
            completions=spec.get("completions"),
            memory=self._memories.setdefault(uid, Memory()),
        )
        suspended = bool(spec.get("suspend"))
        self._start_or_suspend(look, suspended=suspended)
        self._count(look)
        self._decide_end(look, suspended=suspended)
        if look.end is not None or suspended:
            self._delete_pods(look, look.active())
        else:
            self._manage(look)
        self._finish(look)
        self._write(look)
        for pod in look.released:
            self._release(pod)

    def _start_or_suspend(self, look: Look, *, suspended: bool) -> None:
        status, now = look.status, self._clock.stamp()
        was = condition_of({"status": status}, "Suspended")
        if suspended:
            if was is None or was["status"] != "True":
                set_condition(status, now, "Suspended", "True", reason="JobSuspended", message="Job suspended")
                self._events.tell(look.job, "Normal", "Suspended", "Job suspended")
            status.pop("startTime", None)
            return
        if was is not None and was["status"] == "True":
            set_condition(status, now, "Suspended", "False", reason="JobResumed", message="Job resumed")
            self._events.tell(look.job, "Normal", "Resumed", "Job resumed")
        if "startTime" not in status:
            status["startTime"] = now
            if "activeDeadlineSeconds" in look.spec:
                self._soon(look.job, look.spec["activeDeadlineSeconds"] + 1)

    # -- counting

    def _count(self, look: Look) -> None:
        status, completions = look.status, look.completions
        if look.indexed:
            look.completed = indexes.parse(status.get("completedIndexes", ""), completions or 0)
            look.failed = indexes.parse(status.get("failedIndexes", ""), completions or 0)
            look.memory.forget_from(completions or 0)
        for pod in look.pods:
            if TRACKING not in finalizers_of(pod):
                continue
            index = index_of(pod)
            outside = look.indexed and not 0 <= index < (completions or 0)
            if phase_of(pod) == "Succeeded":
                look.released.append(pod)
                look.memory.failures, look.memory.not_before = 0, 0.0
                if not look.indexed:
                    status["succeeded"] = status.get("succeeded", 0) + 1
                elif not outside:
                    look.completed.add(index)
            elif is_failed(look.job, pod):
                if not outside and meta(pod)["uid"] not in look.memory.counted:
                    look.memory.counted.add(meta(pod)["uid"])
                    self._count_failure(look, pod, index)
                if outside or not self._waits_to_be_replaced(look, index):
                    look.memory.counted.discard(meta(pod)["uid"])
                    look.released.append(pod)
        if look.indexed:
            status["succeeded"] = len(look.completed)
            look.failed -= look.completed

    def _waits_to_be_replaced(self, look: Look, index: int) -> bool:
        """The failures of an index are counted on its last pod, which stays tracked until there is another."""
        settled = look.completed | look.failed | {index_of(pod) for pod in look.active()}
        return look.per_index and look.end is None and index not in settled

    def _count_failure(self, look: Look, pod: Json, index: int) -> None:
        memory, now = look.memory, self._clock.now()
        verdict = judge(look.job, pod)
        if verdict.fail_job and look.end is None:
            look.end = ("PodFailurePolicy", verdict.fail_job)
        if verdict.counts:
            look.status["failed"] = look.status.get("failed", 0) + 1
            look.new_failure = True
        if not look.per_index:
            if verdict.counts:
                memory.failures += 1
                memory.not_before = now + self._backoff(memory.failures)
            return
        if index in look.completed:
            return
        failures = int(annotations_of(pod).get(INDEX_FAILURES, 0)) + verdict.counts
        ignored = int(annotations_of(pod).get(INDEX_IGNORED, 0)) + (not verdict.counts)
        memory.index_counts[index] = failures, ignored
        memory.index_not_before[index] = now + self._backoff(failures + ignored)
        if verdict.fail_index or failures > look.spec["backoffLimitPerIndex"]:
            look.failed.add(index)

    def _backoff(self, failures: int) -> float:
        timing = self._timing
        return min(timing.restart_backoff * 2.0 ** max(0, failures - 1), timing.restart_backoff_max)

    # -- ends

    def _decide_end(self, look: Look, *, suspended: bool) -> None:
        before = condition_of({"status": look.status}, "FailureTarget")
        if before is not None:
            look.end = before["reason"], before["message"]
            return
        spec, status = look.spec, look.status
        limit = spec["backoffLimit"]
        if look.end is not None:
            return
        too_many_pods = look.new_failure and status.get("failed", 0) > limit
        in_place = spec["template"]["spec"]["restartPolicy"] == "OnFailure"
        if too_many_pods or (in_place and self._restarted_too_often(look, limit)):
            look.end = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif not suspended and self._past_deadline(look):
            look.end = ("DeadlineExceeded", "Job was active longer than specified deadline")
        elif look.per_index and look.completions is not None:
            most = spec.get("maxFailedIndexes")
            if most is not None and len(look.failed) > most:
                look.end = (
                    "MaxFailedIndexesExceeded",
                    "Job has exceeded the specified maximal number of failed indexes",
                )
            elif look.failed and len(look.failed) + len(look.completed) >= look.completions:
                look.end = ("FailedIndexes", "Job has failed indexes")

    def _restarted_too_often(self, look: Look, limit: int) -> bool:
        restarts = jobrules.restarts_of([pod for pod in look.active() if phase_of(pod) in ("Running", "Pending")])
        return restarts > 0 if limit == 0 else restarts >= limit

    def _past_deadline(self, look: Look) -> bool:
        if "activeDeadlineSeconds" not in look.spec or "startTime" not in look.status:
            return False
        age = self._clock.now() - moment_of(look.status["startTime"])
        return bool(age >= look.spec["activeDeadlineSeconds"])

    def _finish(self, look: Look) -> None:
        """Say that the Job is to fail or has all it needs; say that it has ended when its pods have."""
        status, now = look.status, self._clock.stamp()
        present = self._pods_of(meta(look.job)["uid"])
        still_there = [pod for pod in present if not is_ended(pod)]
        if look.end is not None:
            reason, message = look.end
            if condition_of({"status": status}, "FailureTarget") is None:
                set_condition(status, now, "FailureTarget", "True", reason=reason, message=message)
            if not still_there:
                set_condition(status, now, "Failed", "True", reason=reason, message=message)
                self._events.tell(look.job, "Warning", reason, message)
                self._ended(look)
            return
        if self._has_all(look):
            message = "Reached expected number of succeeded pods"
            set_condition(status, now, "SuccessCriteriaMet", "True", reason="CompletionsReached", message=message)
            if not still_there:
                set_condition(status, now, "Complete", "True", reason="CompletionsReached", message=message)
                status["completionTime"] = now
                self._events.tell(look.job, "Normal", "Completed", "Job completed")
                self._ended(look)

    def _has_all(self, look: Look) -> bool:
        succeeded = look.status.get("succeeded", 0)
        if has_condition({"status": look.status}, "SuccessCriteriaMet"):
            return True
        if look.spec.get("suspend"):
            return False
        if look.completions is None:
            return succeeded > 0 and not look.active()
        return bool(succeeded >= look.completions)

    def _ended(self, look: Look) -> None:
        if "ttlSecondsAfterFinished" in look.spec:
            self._clock.call_later(look.spec["ttlSecondsAfterFinished"], partial(self._expire, look.job))

    def _expire(self, job: Json) -> None:
        found = self._registry.store.get(JOBS, *key_of(job))
        ttl = found["spec"].get("ttlSecondsAfterFinished") if found is not None else None
        if found is None or ttl is None or is_deleting(found) or meta(found)["uid"] != meta(job)["uid"]:
            return
        condition = jobrules.finished(found)
        if condition is None:
            return
        left = moment_of(condition["lastTransitionTime"]) + ttl - self._clock.now()
        if left > 0:
            self._clock.call_later(left, partial(self._expire, job))
            return
        self._registry.delete(JOBS, *key_of(job), DeleteOptions(propagation="Foreground", uid=meta(job)["uid"]))

    # -- pods

    def _manage(self, look: Look) -> None:
        """As many pods as are wanted and no more; indexes outside the range and doubles go first."""
        active = look.active()
        if look.indexed:
            wrong = self._wrong_indexes(look, active)
            self._delete_pods(look, wrong)
            gone = {meta(pod)["uid"] for pod in wrong}
            active = [pod for pod in active if meta(pod)["uid"] not in gone]
        wanted = self._wanted(look, len(active))
        if len(active) > wanted:
            self._delete_pods(look, sorted(active, key=removal_order)[: len(active) - wanted])
            return
        missing = wanted - len(active)
        if jobrules.replaces_only_failed(look.job):
            missing -= len(look.terminating())
        if missing <= 0 or self._has_all(look):
            return
        if look.memory.not_before > self._clock.now() and not look.per_index:
            self._soon(look.job, look.memory.not_before - self._clock.now())
            return
        if look.memory.create_not_before > self._clock.now():
            return
        created = self._create(look, active, min(missing, _PODS_PER_SYNC))
        if not created:
            look.memory.create_not_before = self._clock.now() + _CREATE_AGAIN_S
            self._soon(look.job, _CREATE_AGAIN_S)
        elif missing > _PODS_PER_SYNC:
            self._soon(look.job, 0.0)

    def _wrong_indexes(self, look: Look, active: list[Json]) -> list[Json]:
        seen: set[int] = set()
        wrong = []
        for pod in sorted(active, key=lambda p: (index_of(p), not is_running(p))):
            index = index_of(pod)
            if index in seen or not 0 <= index < (look.completions or 0) or index in look.failed:
                wrong.append(pod)
            seen.add(index)
        return wrong

    def _wanted(self, look: Look, active: int) -> int:
        parallelism: int = look.spec["parallelism"]
        succeeded: int = look.status.get("succeeded", 0)
        if look.completions is None:
            return active if succeeded else parallelism
        return max(0, min(parallelism, look.completions - succeeded - len(look.failed)))

    def _create(self, look: Look, active: list[Json], count: int) -> bool:
        """Create pods one after the other; False: one was refused, so the others were not tried."""
        if not look.indexed:
            return all(self._create_pod(look, None) for _ in range(count))
        taken = {index_of(pod) for pod in active} | look.completed | look.failed
        if jobrules.replaces_only_failed(look.job):
            taken |= {index_of(pod) for pod in look.terminating()}
        now, delayed = self._clock.now(), look.memory.index_not_before
        free = [index for index in range(look.completions or 0) if index not in taken]
        ready = [index for index in free if delayed.get(index, 0.0) <= now]
        created = all(self._create_pod(look, index) for index in ready[:count])
        waiting = [delayed[index] for index in free if delayed.get(index, 0.0) > now]
        if waiting:
            self._soon(look.job, min(waiting) - now)
        return created

    def _create_pod(self, look: Look, index: int | None) -> bool:
        counts = look.memory.index_counts.get(index, (0, 0)) if index is not None and look.per_index else None
        pod = new_pod(look.job, index, counts)
        try:
            created = self._registry.create(PODS, meta(look.job)["namespace"], pod, DECODED)
        except ApiError as error:
            self._events.tell(look.job, "Warning", "FailedCreate", f"Error creating: {error.message}")
            return False
        self._events.tell(look.job, "Normal", "SuccessfulCreate", f"Created pod: {meta(created)['name']}")
        return True

    def _delete_pods(self, look: Look, pods: list[Json]) -> None:
        for pod in pods:
            try:
                self._registry.delete(PODS, *key_of(pod), DeleteOptions(uid=meta(pod)["uid"], propagation="Background"))
            except ApiError as error:
                if error.code != 404:
                    raise
            self._events.tell(look.job, "Normal", "SuccessfulDelete", f"Deleted pod: {meta(pod)['name']}")

    def _pods_of(self, uid: str) -> list[Json]:
        return list(self._pods.get(uid, {}).values())

    def _write(self, look: Look) -> None:
        status, present = look.status, self._pods_of(meta(look.job)["uid"])
        active = [pod for pod in present if not is_ended(pod) and not is_deleting(pod)]
        numbers = {
            "active": len(active),
            "ready": sum(has_condition(pod, "Ready") for pod in active),
            "terminating": sum(not is_ended(pod) and is_deleting(pod) for pod in present),
        }
        status |= numbers
        for key in ("active", "succeeded", "failed"):
            if not status.get(key):
                status.pop(key, None)
        status["uncountedTerminatedPods"] = {}
        if look.indexed:
            set_indexes(status, "completedIndexes", look.completed)
            if look.per_index:
                status["failedIndexes"] = indexes.written(look.failed)
        self._registry.change(JOBS, look.job, lambda job: job.update(status=status))

    def _release(self, pod: Json) -> None:
        """Take the tracking finalizer off a pod that is counted, or that nobody counts."""

        def edit(new: Json) -> None:
            left = [item for item in finalizers_of(new) if item != TRACKING]
            meta(new).pop("finalizers", None)
            if left:
                meta(new)["finalizers"] = left

        if TRACKING in finalizers_of(pod):
            self._registry.change(PODS, pod, edit)

    def _release_all(self, uid: str) -> None:
        """The Job is gone: what is left of its pods is held by nobody."""
        self._memories.pop(uid, None)
        for pod in self._pods_of(uid):
            self._release(pod)
