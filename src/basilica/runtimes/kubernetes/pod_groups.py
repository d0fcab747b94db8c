"""Pod groups of Kueue: the pods of a run that are admitted together. Pure.

The pods of a gang that are created together are one group. A replacement pod joins the group of its predecessor, whose
quota Kueue holds for it. For Kueue a group is over when all its pods have succeeded, or when all have ended and one of
them is marked as not replaced. Such a group is closed, and no pod joins it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from basilica.kube.manifests.run import PodGroup
from basilica.runtimes.kubernetes.parse import PodFacts


def groups_for(instance: str, ranks: Sequence[int], pods: Collection[PodFacts]) -> dict[int, PodGroup]:
    """Return the group of each rank that is to get a pod."""
    closed = {pod.group for pod in pods if pod.group_closed}
    members: dict[PodGroup, set[int]] = {}
    last: dict[int, PodGroup] = {}
    for pod in sorted(pods, key=lambda pod: pod.incarnation):
        if pod.group is not None and pod.group not in closed:
            members.setdefault(pod.group, set()).add(pod.rank)
            last[pod.rank] = pod.group
    found: dict[int, PodGroup] = {rank: last[rank] for rank in ranks if rank in last}
    rest = [rank for rank in ranks if rank not in found]
    for group, there in members.items():  # a group whose creation was interrupted
        while rest and len(there) < group.size:
            there.add(rest[0])
            found[rest.pop(0)] = group
    if rest:
        group = PodGroup(_free_name(instance, {pod.group.name for pod in pods if pod.group is not None}), len(rest))
        found |= dict.fromkeys(rest, group)
    return found


def _free_name(instance: str, taken: Collection[str]) -> str:
    number = 1
    while (name := instance if number == 1 else f"{instance}-{number}") in taken:
        number += 1
    return name


def pods_to_close(pods: Iterable[PodFacts], is_wanted: Callable[[int], bool]) -> tuple[PodFacts, ...]:
    """Return one pod to mark of each group that is over where Kueue cannot know it: not all of its pods succeeded."""
    groups: dict[PodGroup, list[PodFacts]] = {}
    for pod in pods:
        if pod.group is not None:
            groups.setdefault(pod.group, []).append(pod)
    return tuple(_last(mine) for mine in groups.values() if _is_over(mine, is_wanted))


def _is_over(pods: Sequence[PodFacts], is_wanted: Callable[[int], bool]) -> bool:
    if any(pod.group_closed or not pod.over or is_wanted(pod.rank) for pod in pods):
        return False
    latest: Mapping[int, PodFacts] = {pod.rank: pod for pod in sorted(pods, key=lambda pod: pod.incarnation)}
    return any(pod.phase != "Succeeded" for pod in latest.values())


def _last(pods: Sequence[PodFacts]) -> PodFacts:
    return max(pods, key=lambda pod: (pod.rank, pod.incarnation))
