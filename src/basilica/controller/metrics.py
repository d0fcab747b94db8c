"""The controller's metrics for Prometheus: aggregates only, without names of users or runs."""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from basilica.controller.loop import Controller


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
        yield CounterMetricFamily("basilica_controller_turns", "Turns of the controller", self._controller.turns)
        yield CounterMetricFamily("basilica_controller_errors", "Turns that failed", self._controller.errors)
        yield GaugeMetricFamily("basilica_controller_queue_depth", "Runs waiting for a turn", self._controller.depth)
