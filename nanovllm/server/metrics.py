"""Prometheus metrics: the engine's statistics, latencies, requests and the process."""

import time
from collections.abc import AsyncIterator
from functools import partial

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.server.engine_thread import EngineThread, Outputs, Stream
from nanovllm.server.errors import JsonObject

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAUGES = set(
    """
    num_waiting num_running num_free_blocks num_blocks num_free_window_blocks num_window_blocks
    """.split()
)


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(self)  # calls `collect`
        prometheus.ProcessCollector(registry=self.registry)
        self.requests = prometheus.Counter(
            "nanovllm_requests", "HTTP requests that ended", ["status"], registry=self.registry
        )
        histogram = partial(prometheus.Histogram, buckets=BUCKETS, registry=self.registry)
        self.time_to_first_token = histogram(
            "nanovllm_time_to_first_token_seconds", "Time to first token, after tokenization"
        )
        self.request_time = histogram("nanovllm_request_seconds", "Time until the last token")

    def collect(self) -> list[Metric]:
        """Return the engine's statistics. Prometheus calls this for each scrape."""
        metrics: list[Metric] = []
        stats: JsonObject = {**self.engine.llm.stats}
        for name, value in stats.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metrics.append(family(f"nanovllm_{name}", name.replace("_", " "), value=value))
        return metrics

    async def measure(self, stream: Stream) -> AsyncIterator[Outputs]:
        """Yield the outputs of a request, and observe its latency."""
        start = time.perf_counter()
        is_first = True
        async for outputs in stream:
            if is_first:
                self.time_to_first_token.observe(time.perf_counter() - start)
                is_first = False
            yield outputs
        self.request_time.observe(time.perf_counter() - start)
