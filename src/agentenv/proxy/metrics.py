"""What Prometheus reads about the proxy: requests as they end, connections as they stand when asked.

The guest chooses the status and the client the method, so both are shown by their
class: nobody outside can make up new series.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import registry as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentenv.proxy.pool import PoolStatistics
from agentenv.proxy.route import Via

REFUSED: Final = "refused"  # instead of a source: it could not be told which sandbox was meant
LEFT: Final = "left"  # instead of a status: the client was gone first

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0, 3600.0)
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class ProxyMetrics:
    """An `agentenv.proxy.app.Observer` that counts in *registry*."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._duration = Histogram(
            "agentenv_proxy_request_duration_seconds",
            "Time from the head of a request for a sandbox to the end of its answer or tunnel.",
            ("method", "route_source", "status"),
            registry=registry,
            buckets=_BUCKETS_S,
        )

    def __call__(self, via: Via | None, method: str, status: int | None, duration_s: float) -> None:
        self._duration.labels(
            method if method in _METHODS else "OTHER",
            via.value if via is not None else REFUSED,
            f"{status // 100}xx" if status is not None else LEFT,
        ).observe(duration_s)

    def show(self, statistics: Callable[[], PoolStatistics]) -> None:
        """Let the registry also show what *statistics* (of one proxy) returns. Once."""
        self._registry.register(_Connections(statistics))


class _Connections(prometheus.Collector):
    def __init__(self, statistics: Callable[[], PoolStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        now = self._statistics()
        connections = GaugeMetricFamily(
            "agentenv_proxy_guest_connections", "Connections to guests that are open.", labels=["state"]
        )
        connections.add_metric(["busy"], now.busy)
        connections.add_metric(["idle"], now.idle)
        yield connections
        uses = CounterMetricFamily(
            "agentenv_proxy_guest_connection_uses", "Connections to guests since the start.", labels=["outcome"]
        )
        uses.add_metric(["opened"], now.opened)
        uses.add_metric(["reused"], now.reused)
        uses.add_metric(["cut"], now.cut)
        yield uses

    def describe(self) -> Iterator[Metric]:
        """Nothing: what it shows is read when asked."""
        return iter(())
