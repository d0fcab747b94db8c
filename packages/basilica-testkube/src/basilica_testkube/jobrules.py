"""The Job controller's judgements about pods, without the controller."""

from dataclasses import dataclass

from basilica_testkube.values import Json, annotations_of, is_deleting, meta, phase_of

INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
INDEX_FAILURES = "batch.kubernetes.io/job-index-failure-count"
INDEX_IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed pod means to its Job."""

    counts: bool
    fail_job: str = ""  # the message, if the Job fails because of it
    fail_index: bool = False


def index_of(pod: Json) -> int:
    return int(annotations_of(pod).get(INDEX, "-1"))


def is_failed(job: Json, pod: Json) -> bool:
    """A pod that is being deleted counts as failed at once, unless only pods that have ended are replaced."""
    if phase_of(pod) == "Failed":
        return True
    return is_deleting(pod) and phase_of(pod) != "Succeeded" and not replaces_only_failed(job)


def replaces_only_failed(job: Json) -> bool:
    return bool(job["spec"]["podReplacementPolicy"] == "Failed")


def judge(job: Json, pod: Json) -> Verdict:
    """Apply the pod failure policy; the first rule that fits decides, and without one the failure counts."""
    if phase_of(pod) != "Failed":
        return Verdict(counts=True)
    for number, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules") or []):
        found = _exit_code_match(rule, pod) if "onExitCodes" in rule else _condition_match(rule, pod)
        if found is None:
            continue
        match rule["action"]:
            case "FailJob":
                return Verdict(counts=True, fail_job=f"{found} matching FailJob rule at index {number}")
            case "FailIndex":
                return Verdict(counts=True, fail_index=True)
            case "Ignore":
                return Verdict(counts=False)
            case _:
                return Verdict(counts=True)
    return Verdict(counts=True)


def _exit_code_match(rule: Json, pod: Json) -> str | None:
    wanted = rule["onExitCodes"]
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if wanted.get("containerName") not in (None, container["name"]):
            continue
        code = container["state"].get("terminated", {}).get("exitCode", 0)
        if code != 0 and (code in wanted["values"]) is (wanted["operator"] == "In"):
            where = f"{meta(pod)['namespace']}/{meta(pod)['name']}"
            return f"Container {container['name']} for pod {where} failed with exit code {code}"
    return None


def _condition_match(rule: Json, pod: Json) -> str | None:
    for condition in pod.get("status", {}).get("conditions") or []:
        for wanted in rule["onPodConditions"]:
            if (condition["type"], condition["status"]) == (wanted["type"], wanted.get("status", "True")):
                return f"Pod {meta(pod)['namespace']}/{meta(pod)['name']} has condition {condition['type']}"
    return None


def restarts_of(pods: list[Json]) -> int:
    """How often the containers of running pods were started again."""
    return sum(
        status["restartCount"]
        for pod in pods
        for field in ("initContainerStatuses", "containerStatuses")
        for status in pod.get("status", {}).get(field) or []
    )


def finished(job: Json) -> Json | None:
    """The condition that ended the Job."""
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            found: Json = condition
            return found
    return None
