"""Parser of the bench probe's two pods. Pure: their reports are in their termination messages."""

from collections.abc import Collection, Sequence

from basilica.bench.report import parse, problem_in
from basilica.core.phase import BenchPhase
from basilica.core.seen import SeenBench
from basilica.runtimes.kubernetes.parse import PodFacts

RUNNING = "two pods measure the link between them"
ELSEWHERE = "not on the nodes of the ranks"


def see_bench(pods: Sequence[PodFacts], worker_nodes: Collection[str]) -> SeenBench:
    """Return the report of either end as the result, or the problem of the first pod that failed as the reason."""
    for pod in pods:
        if pod.state == "terminated" and pod.exit_code == 0:
            try:
                result = parse(pod.message)
            except ValueError as error:
                return SeenBench(phase=BenchPhase.FAILED, message=str(error))
            home = {result.probe_node_a, result.probe_node_b} <= set(worker_nodes)
            message = f"measured between {result.probe_node_a} and {result.probe_node_b}"
            if result.probe_node_a == result.probe_node_b:
                message = f"measured within {result.probe_node_a}: no network is between pods of one node"
            message = message if home else f"{message}, {ELSEWHERE}"
            return SeenBench(phase=BenchPhase.SUCCEEDED, message=message, on_worker_nodes=home, result=result)
    failed = [pod for pod in pods if pod.over]
    if failed:
        first = min(failed, key=lambda pod: (pod.finished_at, pod.rank))
        why = problem_in(first.message) or f"probe {first.rank} ended with code {first.exit_code}"
        return SeenBench(phase=BenchPhase.FAILED, message=why)
    if any(pod.state == "running" for pod in pods):
        return SeenBench(phase=BenchPhase.RUNNING, message=RUNNING)
    waiting = next((pod.unschedulable or pod.reason for pod in pods if pod.unschedulable or pod.reason), "")
    return SeenBench(phase=BenchPhase.PENDING, message=waiting)
