"""The network between the nodes of a run, from the reports of its ranks. Pure."""

from collections.abc import Callable, Collection

from basilica.core.mesh import Pair, SeenMesh, heard
from basilica.core.world import WorldSize
from basilica.runtimes.kubernetes.parse import PodFacts

Failing = Callable[[tuple[str, ...]], tuple[Pair, ...]]  # the ways between these agents that do not work


def see_mesh(pods: Collection[PodFacts], world: WorldSize, failing: Failing, limit_seconds: float) -> SeenMesh | None:
    """Return the nodes of the ranks, once as many ranks as the run needs have one; before that no gate can be opened. A
    rank that has a node need not run yet: its image may still be on its way.

    Each rank has an agent, named by its node and itself, that reports on every other: pods of one node have addresses
    of their own. A failure between two agents is a failure between their nodes.
    """
    placed = [pod for pod in pods if pod.node and not pod.over and not pod.deleting and pod.rank < world.target]
    if len({pod.rank for pod in placed}) < world.min:
        return None
    agents = tuple(sorted({f"{pod.node}/{pod.rank}" for pod in placed}))
    pairs = failing(agents)
    wrong = {(_node(pair.source), _node(pair.target)): pair.problem for pair in pairs}
    return SeenMesh(
        hosts=tuple(sorted({pod.node for pod in placed})),
        failing=tuple(Pair(source, target, problem) for (source, target), problem in sorted(wrong.items())),
        limit_seconds=limit_seconds,
        enough=heard(agents, pairs) >= world.min,
    )


def _node(agent: str) -> str:
    return agent.rpartition("/")[0] or agent
