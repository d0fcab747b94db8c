"""The metrics that Prometheus reads at `/metrics`: aggregates only, without names of users or runs."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from basilica.controller.loop import Controller
from basilica.controller.metrics import ControllerCollector

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["method", "route", "status"]
        self._requests = Counter("basilica_http_requests", "Requests answered", labels, registry=self.registry)
        self._seconds = Histogram(
            "basilica_http_request_seconds", "Time to answer", ["route"], buckets=_BUCKETS, registry=self.registry
        )

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def add_controller(self, controller: Controller) -> None:
        self.registry.register(ControllerCollector(controller))

    def text(self) -> bytes:
        return generate_latest(self.registry)
