"""A pod from a Job's template."""

from basilica_testkube.jobrules import INDEX, INDEX_FAILURES, INDEX_IGNORED, TRACKING
from basilica_testkube.values import Json, containers_of, copied, meta


def new_pod(job: Json, index: int | None, counts: tuple[int, int] | None) -> Json:
    """The next pod of a Job; `counts` are the failures of its index, where the Job limits them for each index."""
    template = copied(job["spec"]["template"])
    metadata = {
        key: value
        for key, value in (template.get("metadata") or {}).items()
        if key in ("labels", "annotations", "finalizers")
    }
    pod: Json = {"metadata": metadata, "spec": template["spec"]}
    name = meta(job)["name"]
    metadata["generateName"] = f"{name}-" if index is None else f"{name}-{index}-"
    metadata["finalizers"] = [*metadata.get("finalizers", []), TRACKING]
    metadata["ownerReferences"] = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": meta(job)["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    if index is not None:
        metadata.setdefault("labels", {})[INDEX] = str(index)
        annotations = metadata.setdefault("annotations", {})
        annotations[INDEX] = str(index)
        if counts is not None:
            annotations[INDEX_FAILURES] = str(counts[0])
            if counts[1]:
                annotations[INDEX_IGNORED] = str(counts[1])
        pod["spec"].setdefault("hostname", f"{name}-{index}")
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        for container in containers_of(pod):
            if not any(variable["name"] == "JOB_COMPLETION_INDEX" for variable in container.get("env") or []):
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
    return pod
