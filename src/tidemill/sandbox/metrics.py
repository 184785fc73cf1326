"""Counters and times of the service, in a registry of its own, for GET /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """What the service counts. Names begin with tidemill_sandbox_; times are seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._operations = Histogram("tidemill_sandbox_operation_seconds", "Life-changing operations that succeeded",
                                     ["operation"], buckets=_BUCKETS, registry=self.registry)
        self._calls = Histogram("tidemill_sandbox_call_seconds", "Commands, session runs and file transfers",
                                ["call"], buckets=_BUCKETS, registry=self.registry)
        self._failures = Counter("tidemill_sandbox_failures", "Failures of the service itself", ["where"],
                                 registry=self.registry)
        self._reaped = Counter("tidemill_sandbox_reaped", "Sandboxes ended by the service", ["why"],
                               registry=self.registry)
        self._adopted = Counter("tidemill_sandbox_adopted", "Sandboxes found at start", ["result"],
                                registry=self.registry)
        self._alive = Gauge("tidemill_sandbox_alive", "Living sandboxes", ["state"], registry=self.registry)
        self._heavy = Gauge("tidemill_sandbox_heavy", "Heavy operations", ["state"], registry=self.registry)

    def operation(self, name: str, seconds: float) -> None:
        self._operations.labels(name).observe(seconds)

    def call(self, name: str, seconds: float) -> None:
        self._calls.labels(name).observe(seconds)

    def failure(self, where: str) -> None:
        self._failures.labels(where).inc()

    def reaped(self, why: str, count: int) -> None:
        self._reaped.labels(why).inc(count)

    def adopted(self, result: str) -> None:
        self._adopted.labels(result).inc()

    def render(self, *, states: dict[str, int], active: int, waiting: int) -> bytes:
        """Prometheus text with the given gauges."""
        self._alive.clear()
        for state, count in states.items():
            self._alive.labels(state).set(count)
        self._heavy.labels("active").set(active)
        self._heavy.labels("waiting").set(waiting)
        return generate_latest(self.registry)
