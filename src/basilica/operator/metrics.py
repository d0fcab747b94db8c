"""Prometheus metrics of an operator: the controller's figures while it leads, and whether it does."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from basilica.controller.loop import Controller
from basilica.controller.metrics import ControllerCollector


class OperatorMetrics:
    def __init__(self, controller: Callable[[], Controller | None], leading: Callable[[], bool]) -> None:
        self._controller, self._leading = controller, leading
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("basilica_operator_leads", "1 if this operator acts", float(self._leading()))
        controller = self._controller()
        if controller is not None:
            yield from ControllerCollector(controller).collect()

    def text(self) -> bytes:
        return generate_latest(self._registry)
