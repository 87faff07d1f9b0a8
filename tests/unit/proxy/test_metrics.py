"""Every metric of the proxy is moved by something, and by nothing that a stranger can make up."""

from prometheus_client import CollectorRegistry, generate_latest

from agentenv.proxy import Proxy, ProxyMetrics
from agentenv.proxy.route import Via
from tests.unit.proxy.world import World, control_app, on_uvloop


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@on_uvloop
async def test_requests_and_connections_are_shown() -> None:
    registry = CollectorRegistry()
    async with World() as world:
        metrics = ProxyMetrics(registry)
        world.proxy = Proxy(world.node, control_app, observe=metrics)
        metrics.show(world.proxy.statistics)
        guest = await world.guest()
        for _ in range(2):
            await world.ask(guest)
        guest.port = 1
        await world.ask(guest)
        count = "agentenv_proxy_request_duration_seconds_count"
        assert value(registry, count, method="GET", route_source="proxy_header", status="2xx") == 2
        assert value(registry, count, method="GET", route_source="proxy_header", status="5xx") == 1
        assert value(registry, "agentenv_proxy_guest_connections", state="idle") == 1
        assert value(registry, "agentenv_proxy_guest_connections", state="busy") == 0
        assert value(registry, "agentenv_proxy_guest_connection_uses_total", outcome="opened") == 1
        assert value(registry, "agentenv_proxy_guest_connection_uses_total", outcome="reused") == 1
        world.proxy.forget(guest.sandbox.id)
        assert value(registry, "agentenv_proxy_guest_connection_uses_total", outcome="cut") == 1


def test_labels_are_few_whatever_is_asked() -> None:
    registry = CollectorRegistry()
    metrics = ProxyMetrics(registry)
    for number in range(500):
        metrics(Via.HOST, f"M{number}", 100 + number, 0.1)
    metrics(None, "GET", 400, 0.1)
    metrics(Via.HEADER, "GET", None, 0.1)
    lines = [line for line in generate_latest(registry).decode().splitlines() if "_count{" in line]
    assert len(lines) == 7
    assert any('status="left"' in line for line in lines)
    assert any('route_source="refused"' in line for line in lines)
