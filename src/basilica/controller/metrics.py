"""The controller's metrics for Prometheus: aggregates only, without names of users or runs."""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from basilica.controller.loop import Controller
from basilica.core.goodput import Cause
from basilica.core.incidents import IncidentKind


class ControllerCollector:
    """Counts at each scrape, and costs nothing in between."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        phases: Tally[str] = Tally()
        ranks: Tally[str] = Tally()
        for deployment in self._controller.live():
            phases[deployment.status.phase.value] += 1
            ranks.update(rank.phase.value for rank in deployment.status.ranks)
        live = GaugeMetricFamily("basilica_live_deployments", "Runs that are not settled", labels=["phase"])
        for phase, count in phases.items():
            live.add_metric([phase], count)
        yield live
        wanted = GaugeMetricFamily("basilica_live_ranks", "Ranks of live runs", labels=["state"])
        for state, count in ranks.items():
            wanted.add_metric([state], count)
        yield wanted
        yield from self._accounts()
        yield CounterMetricFamily("basilica_controller_turns", "Turns of the controller", self._controller.turns)
        yield CounterMetricFamily("basilica_controller_errors", "Turns that failed", self._controller.errors)
        yield GaugeMetricFamily("basilica_controller_queue_depth", "Runs waiting for a turn", self._controller.depth)

    def _accounts(self) -> Iterator[Metric]:
        tally = self._controller.tally
        seconds = tally.seconds(self._controller.live(), self._controller.now())
        for unit, about in (("rank", "Time of wanted ranks by its cause"), ("gpu", "Time of their GPUs by its cause")):
            time = CounterMetricFamily(f"basilica_{unit}_seconds", about, labels=["cause"])
            for cause in Cause:
                time.add_metric([cause.value], seconds[unit, cause.value])
            yield time
        incidents = CounterMetricFamily("basilica_incidents", "Interruptions of trainings", labels=["kind"])
        for kind in IncidentKind:
            incidents.add_metric([kind.value], tally.incidents[kind.value])
        yield incidents
        yield CounterMetricFamily(
            "basilica_worker_failures", "Workers of torchrun agents that failed by themselves", tally.worker_failures
        )
