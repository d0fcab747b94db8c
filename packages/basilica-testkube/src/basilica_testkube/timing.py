"""How long the parts of a cluster take, in seconds of its clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Delays of a cluster. The defaults keep the order in which things become visible, but not the waiting.

    A container's end is seen first, the pod's phase after it, the Job's status last: code that trusts the later ones
    must find that out here.
    """

    schedule: float = 0.005
    start: float = 0.01  # from a node to a running container
    container_status: float = 0.02  # from a container's end to its status
    phase: float = 0.03  # from there to the pod's phase
    job_sync: float = 0.04  # from a change of a pod to the Job's status
    garbage: float = 0.01
    storage: float = 0.001  # between reading an object and deleting it: two deletions can meet here
    restart_backoff: float = 10.0  # doubled by each failure: of an index, of a Job's pods, of a container
    restart_backoff_max: float = 600.0
    container_backoff_max: float = 300.0
    image_backoff: float = 10.0
    node_grace: float = 40.0  # from a node's last word to `Unknown`
    unreachable_toleration: float = 300.0  # from there to the eviction of its pods
    event_ttl: float = 3600.0


MEASURED = Timing(schedule=0.1, start=0.8, container_status=0.9, phase=0.5, job_sync=1.0, garbage=0.3)
"""As a real cluster was measured: 0.9 s from an exit to the container's status, 2.3 s to the Job's."""
