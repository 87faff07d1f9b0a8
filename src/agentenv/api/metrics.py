"""What Prometheus reads: requests as they end, and the node as it stands when asked.

One registry per app, so that two apps in one process (tests, a gateway) do not meet.
Labels are bounded: a route is its template, never a path that a client made up.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import registry as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentenv.node.contract import Node, NodeInfo

UNMATCHED: Final = "unmatched"
CANCELED: Final = "canceled"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ApiMetrics:
    """Counts requests of the control API in *registry*, which also shows *node*."""

    def __init__(self, node: Node, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._duration = Histogram(
            "agentenv_http_request_duration_seconds",
            "Time from the request line to the end of the answer.",
            ("method", "route", "route_source", "status"),
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self.in_progress = Gauge(
            "agentenv_http_requests_in_progress", "Requests being answered now.", registry=self.registry
        )
        self.internal_errors = Counter(
            "agentenv_http_internal_errors", "Answers of 500: bugs, each logged with its id.", registry=self.registry
        )
        self.replays = Counter(
            "agentenv_http_idempotent_replays",
            "Creates answered with the outcome of an earlier one that had the same Idempotency-Key.",
            registry=self.registry,
        )
        self.registry.register(_NodeFigures(node))

    def ended(self, *, method: str, route: str, status: str, seconds: float) -> None:
        known = method if method in _METHODS else "OTHER"
        self._duration.labels(known, route, "control_plane", status).observe(seconds)
        if status == "500":
            self.internal_errors.inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _NodeFigures(prometheus.Collector):
    """Reads the node once per scrape."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        info = self._node.info()
        yield from _sandboxes(info)
        yield from _machine(info)

    def describe(self) -> Iterator[Metric]:
        """Nothing: asking would read the node while the server is still being put together."""
        return iter(())


def _sandboxes(info: NodeInfo) -> Iterator[Metric]:
    states = GaugeMetricFamily("agentenv_sandboxes", "Sandboxes by state.", labels=["state"])
    states.add_metric(["running"], info.running)
    states.add_metric(["starting"], info.starting)
    states.add_metric(["paused"], info.paused)
    states.add_metric(["error"], info.errored)
    yield states
    creates = CounterMetricFamily("agentenv_sandbox_creates", "Creates since the start.", labels=["outcome"])
    creates.add_metric(["success"], info.create_successes)
    creates.add_metric(["failure"], info.create_fails)
    yield creates
    cpus = GaugeMetricFamily("agentenv_allocated_cpus", "Virtual CPUs promised to sandboxes.", labels=["held_by"])
    cpus.add_metric(["running"], info.allocated_cpu)
    cpus.add_metric(["paused"], info.paused_allocated_cpu)
    yield cpus
    memory = GaugeMetricFamily("agentenv_allocated_memory_bytes", "Memory promised to sandboxes.", labels=["held_by"])
    memory.add_metric(["running"], info.allocated_memory_bytes)
    memory.add_metric(["paused"], info.paused_allocated_memory_bytes)
    yield memory


def _machine(info: NodeInfo) -> Iterator[Metric]:
    yield GaugeMetricFamily("agentenv_node_cpu_percent", "CPU use of the host, of all its CPUs.", info.cpu_percent)
    yield GaugeMetricFamily("agentenv_node_cpus", "CPUs of the host.", info.cpu_count)
    memory = GaugeMetricFamily("agentenv_node_memory_bytes", "Memory of the host.", labels=["kind"])
    memory.add_metric(["used"], info.memory_used_bytes)
    memory.add_metric(["total"], info.memory_total_bytes)
    yield memory
    disks = GaugeMetricFamily("agentenv_node_disk_bytes", "Disks of the host.", labels=["mount_point", "kind"])
    for disk in info.disks:
        disks.add_metric([disk.mount_point, "used"], disk.used_bytes)
        disks.add_metric([disk.mount_point, "total"], disk.total_bytes)
    yield disks
    labels = {
        "node": info.id, "version": info.version, "status": info.status, "driver": info.driver,
        "accelerator": info.accelerator,
    }  # fmt: skip
    about = GaugeMetricFamily("agentenv_node_info", "Always 1; the labels say what this node is.", labels=list(labels))
    about.add_metric(list(labels.values()), 1)
    yield about
