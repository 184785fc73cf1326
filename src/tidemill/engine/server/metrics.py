"""Prometheus metrics of one server: HTTP counts and times kept here, engine gauges read at each scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tidemill.core.engine_api import EngineInfo

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter("tidemill_http_requests", "Requests by endpoint and status.", ("path", "status"),
                                registry=self._registry)
        self.seconds = Histogram("tidemill_http_request_seconds", "Time to the end of the response.", ("path",),
                                 buckets=_SECONDS, registry=self._registry)
        self.first_token = Histogram("tidemill_time_to_first_token_seconds", "Time to the first delta of a choice.",
                                     buckets=_SECONDS, registry=self._registry)
        self.prompt_tokens = Counter("tidemill_prompt_tokens", "Prompt tokens of finished requests.",
                                     registry=self._registry)
        self.completion_tokens = Counter("tidemill_completion_tokens", "Tokens sampled for finished requests.",
                                         registry=self._registry)
        self.malformed_calls = Counter("tidemill_malformed_tool_calls", "Tool calls that could not be understood.",
                                       registry=self._registry)
        self._engine = Gauge("tidemill_engine", "The engine's counters since start and present sizes, by name.",
                             ("name",), registry=self._registry)
        self._version = Gauge("tidemill_engine_policy_version", "Policy version served.", registry=self._registry)
        self._asleep = Gauge("tidemill_engine_asleep", "1 while the engine sleeps.", registry=self._registry)

    def render(self, info: EngineInfo) -> bytes:
        """Text exposition, with the engine's numbers as of now."""
        for name, value in info.stats.items():
            self._engine.labels(name).set(value)
        self._version.set(info.version)
        self._asleep.set(bool(info.asleep))
        return generate_latest(self._registry)
