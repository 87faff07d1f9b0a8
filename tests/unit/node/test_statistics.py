"""What the parts of a node count is on the metrics page, and moves there."""

import asyncio
from dataclasses import fields
from pathlib import Path

from prometheus_client import CollectorRegistry

from agentenv.aio.operations import Operations, OperationStatistics
from agentenv.model.errors import Unavailable
from agentenv.network.dns.forwarder import DnsStatistics
from agentenv.network.host import HostFlows
from agentenv.network.pool import PoolStatistics
from agentenv.network.pooled import SlotStatistics
from agentenv.network.slots import NetworkStatistics
from agentenv.node.spares import SpareStatistics
from agentenv.node.statistics import NodeStatistics
from agentenv.state.connection import ConnectionStatistics
from agentenv.state.engine import sqlite_url
from agentenv.state.sql import SqlStore

NETWORK = NetworkStatistics(
    PoolStatistics(1, 2, 3, 4, 5),
    SlotStatistics(6, 7, 8, 9, 10),
    DnsStatistics(11, 12, 13, 14, 15, 16, 17, 18),
    HostFlows(19, 20),
    21,
)
OPERATIONS = OperationStatistics(22, 23, 24, 25, 26, 27)
STORE = ConnectionStatistics(28, 29, 30, 31)
SPARES = SpareStatistics(32, 33, 34, 35, 36, 37, 38)


def shown(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_every_figure_is_shown_once() -> None:
    registry = CollectorRegistry()
    registry.register(NodeStatistics(lambda: NETWORK, lambda: OPERATIONS, lambda: STORE, lambda: SPARES))

    counted = [
        PoolStatistics, SlotStatistics, DnsStatistics, HostFlows, OperationStatistics, ConnectionStatistics,
        SpareStatistics,
    ]  # fmt: skip
    assert sum(len(fields(one)) for one in counted) + 1 == 38
    assert sorted(shown(registry).values()) == list(range(1, 39))


async def test_they_move(tmp_path: Path) -> None:
    operations, store = Operations(), SqlStore(sqlite_url(tmp_path / "aenv.db"))
    await store.start()
    network = NETWORK
    registry = CollectorRegistry()
    registry.register(NodeStatistics(lambda: network, operations.statistics, store.statistics, lambda: SPARES))
    before = shown(registry)
    going = asyncio.Event()

    async def work() -> None:
        await store.sandboxes()
        await going.wait()

    asking = asyncio.create_task(operations.run("x", "work", work))
    while operations.statistics().in_progress == 0:
        await asyncio.sleep(0)
    during = shown(registry)
    going.set()
    await asking
    await store.delete_sandbox("00000000-0000-4000-8000-000000000000")  # type: ignore[arg-type]  # of nobody
    network = NetworkStatistics(PoolStatistics(0, 0, 9, 0, 0), SlotStatistics(), DnsStatistics(), HostFlows(0, 0), 0)
    after = shown(registry)

    assert during["agentenv_operations", "in_progress"] == 1
    assert after["agentenv_operations", "in_progress"] == 0
    assert after["agentenv_operation_events_total", "started"] == 1
    assert after["agentenv_store_events_total", "job"] > before["agentenv_store_events_total", "job"]
    assert (before["agentenv_network_slots", "held"], after["agentenv_network_slots", "held"]) == (3, 9)
    await operations.close()
    await store.close()


def test_a_part_that_is_closed_does_not_take_the_page_with_it() -> None:
    def closed() -> NetworkStatistics:
        raise Unavailable("the network is not started")

    registry = CollectorRegistry()
    registry.register(NodeStatistics(closed, lambda: OPERATIONS, lambda: STORE, lambda: SPARES))

    names = {name for name, *_ in shown(registry)}
    assert "agentenv_store_waiting" in names
    assert "agentenv_network_slots" not in names
