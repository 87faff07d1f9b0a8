"""What the parts of a node count by themselves, read when Prometheus asks."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import registry as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentenv.aio.operations import OperationStatistics
from agentenv.model.errors import Unavailable
from agentenv.network.slots import NetworkStatistics
from agentenv.node.spares import SpareStatistics
from agentenv.state.connection import ConnectionStatistics


class NodeStatistics(prometheus.Collector):
    """Shows the statistics of the network, the operations, the store and the spare VMMs; register it once.

    A part that is not started or closed already is left out, and the others are shown.
    """

    def __init__(
        self,
        network: Callable[[], NetworkStatistics],
        operations: Callable[[], OperationStatistics],
        store: Callable[[], ConnectionStatistics],
        spares: Callable[[], SpareStatistics],
    ) -> None:
        self._network = network
        self._operations = operations
        self._store = store
        self._spares = spares

    def collect(self) -> Iterator[Metric]:
        for show in (self._of_network, self._of_operations, self._of_store, self._of_spares):
            try:
                shown = list(show())
            except Unavailable:
                continue
            yield from shown

    def describe(self) -> Iterator[Metric]:
        """Nothing: what it shows is read when asked."""
        return iter(())

    def _of_network(self) -> Iterator[Metric]:
        now = self._network()
        pool, slots, dns = now.pool, now.slots, now.dns
        yield _gauge(
            "agentenv_network_slots",
            "Slots by what they are for now.",
            "state",
            {
                "warm": pool.warm,
                "making": pool.making,
                "held": pool.held,
                "leaving": pool.leaving,
                "foreign": pool.foreign,
            },
        )
        yield _counter(
            "agentenv_network_slot_events",
            "Slots acquired (hit: warm, miss: waited for), made, removed, and failures, since the start.",
            "event",
            {
                "hit": slots.hits,
                "miss": slots.misses,
                "made": slots.made,
                "removed": slots.removed,
                "failure": slots.failures,
            },
        )
        yield GaugeMetricFamily("agentenv_dns_in_flight", "Names of guests being resolved.", dns.in_flight)
        yield _counter(
            "agentenv_dns_questions",
            "What guests asked the forwarder of names, and what became of it.",
            "outcome",
            {
                "asked": dns.questions,
                "answered": dns.answered,
                "failed": dns.failed,
                "malformed": dns.malformed,
                "refused": dns.refused,
                "dropped": dns.dropped,
                "retried": dns.retried,
            },
        )
        yield _gauge(
            "agentenv_network_host_flows",
            "Connections that the host tracks, of everybody, and the most it can.",
            "which",
            {"tracked": now.flows.tracked, "most": now.flows.most},
        )
        yield CounterMetricFamily(
            "agentenv_network_repairs", "How often the host's rules were gone and were put back.", now.repairs
        )

    def _of_operations(self) -> Iterator[Metric]:
        now = self._operations()
        yield _gauge(
            "agentenv_operations",
            "Operations in progress, callers that wait for one, and cancelled ones that do not end.",
            "which",
            {"in_progress": now.in_progress, "waiters": now.waiters, "stuck": now.stuck},
        )
        yield _counter(
            "agentenv_operation_events",
            "Operations started, joined by a second caller, and cut short by a delete.",
            "event",
            {"started": now.started, "joined": now.joined, "cut": now.cut},
        )

    def _of_store(self) -> Iterator[Metric]:
        now = self._store()
        yield GaugeMetricFamily("agentenv_store_waiting", "Jobs that wait for the database.", now.waiting)
        yield _counter(
            "agentenv_store_events",
            "Jobs of the database, the commits that they shared, and failures.",
            "event",
            {"job": now.jobs, "commit": now.commits, "failure": now.failures},
        )

    def _of_spares(self) -> Iterator[Metric]:
        now = self._spares()
        yield GaugeMetricFamily("agentenv_spare_vmms", "VMMs that wait for a sandbox.", now.waiting)
        yield _counter(
            "agentenv_spare_vmm_events",
            "Starts that took a waiting VMM (hit), found none (miss) or got one that had to be replaced (broken); "
            "VMMs made ahead of need, ended while they waited (died), and not made (failure).",
            "event",
            {
                "hit": now.hits,
                "miss": now.misses,
                "broken": now.broken,
                "made": now.made,
                "died": now.died,
                "failure": now.failures,
            },
        )


def _gauge(name: str, about: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, about: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
