"""The program: every part of a node chosen and joined, in plain sight, and served until told to stop.

Sandboxes outlive it: a server that stops leaves the VMs running, and the next one
takes them over. Started twice on one home, the second says so and ends.
"""

import asyncio
import os
import platform
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from agentenv.aio.clock import SystemClock
from agentenv.aio.failpoints import REGISTRY
from agentenv.aio.operations import Operations
from agentenv.aio.tasks import Tasks
from agentenv.api.app import create_app
from agentenv.api.builds import BuildRoutes
from agentenv.api.settings import ApiSettings
from agentenv.api.upload import Uploads
from agentenv.config.resolve import Resolved
from agentenv.config.schema import Settings
from agentenv.config.secrets import RUN_SECRETS, load_api_key, load_credentials
from agentenv.doctor import Places
from agentenv.guest.agent import HttpAgents
from agentenv.guest.contract import CaBundle
from agentenv.guest.image import load_guest
from agentenv.listen import bind, heed_signals
from agentenv.logs import set_up_logs
from agentenv.model.errors import Invalid
from agentenv.model.sandbox import Sandbox
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots
from agentenv.node.catalogue import Catalogue
from agentenv.node.collect import Collector
from agentenv.node.exclusive import alone_in
from agentenv.node.host import Host, NodeSettings
from agentenv.node.log import log_change
from agentenv.node.registry import Registry
from agentenv.node.service import NodeService
from agentenv.node.spares import Spares, SpareSettings
from agentenv.node.statistics import NodeStatistics
from agentenv.node.timings import Timings
from agentenv.preconditions import require_privileges, writable_directory
from agentenv.proxy.app import Proxy
from agentenv.proxy.inbound.limits import ServerLimits
from agentenv.proxy.inbound.serve import http_server, raise_descriptor_limit
from agentenv.proxy.metrics import ProxyMetrics
from agentenv.proxy.settings import ProxySettings
from agentenv.state.engine import sqlite_url
from agentenv.state.sql import SqlStore
from agentenv.storage.choice import look, open_storage
from agentenv.storage.contract import Storage
from agentenv.templates.service import BuildLimits, TemplateBuilder
from agentenv.vmm.qemu import QemuVmm

log = structlog.get_logger(__name__)


def run(resolved: Resolved) -> None:
    """Serve until SIGINT or SIGTERM. Raises one of our kinds when it cannot start."""
    set_up_logs(resolved.settings.log)
    for note in resolved.notes:
        log.warning(note)
    if resolved.settings.debug.failpoints:
        REGISTRY.arm_text(resolved.settings.debug.failpoints)
    if client_domain(resolved.settings) is None:
        log.warning("clients cannot be told under which names ports are reached: set server.domains")
    raise_descriptor_limit()
    uvloop.run(_serve(resolved.settings))


async def _serve(settings: Settings) -> None:
    async with _node(settings) as (node, app):
        limits = ServerLimits(**settings.limits.model_dump(exclude={"max_body_bytes", "body_timeout_s"}))
        host, port = settings.server.listen_host, settings.server.listen_port
        server = http_server(app, host, port, limits)
        listening = await bind(host, port, backlog=server.config.backlog)
        heed_signals(server, limits.stop_timeout_s)
        log.info(
            "serving",
            url=f"http://{host}:{listening[0].getsockname()[1]}",
            api_key_in=key_origin(settings),
            sandboxes=len(node.sandboxes()),
        )
        await server.serve(sockets=listening)
    log.info("stopped; sandboxes live on")


def key_origin(settings: Settings) -> str:
    """Where the API key is, for people: a file, or the setting that holds it."""
    if settings.auth.api_key is not None:
        return "auth.api_key"
    if settings.auth.api_key_file is not None:
        return str(settings.auth.api_key_file)
    mounted = RUN_SECRETS / "api-key"
    return str(mounted if mounted.exists() else settings.paths.home / "secrets/api-key")


@asynccontextmanager
async def _node(settings: Settings) -> AsyncIterator[tuple[NodeService, Proxy]]:
    """A started node behind its API and proxy."""
    home, runtime = settings.paths.home, settings.paths.runtime
    require_privileges(
        Places(home=home, guest_dir=settings.guest_dir, qemu=settings.vmm.qemu_binary), user=os.geteuid()
    )
    guest = await asyncio.to_thread(load_guest, settings.guest_dir)
    writable_directory(home, setting="paths.home")
    writable_directory(runtime, setting="paths.runtime")
    clock = SystemClock()
    metrics = CollectorRegistry()
    async with AsyncExitStack() as opened:
        opened.enter_context(alone_in(runtime))
        storage = await _storage(settings)
        await storage.start()
        opened.push_async_callback(storage.close)

        database = settings.state.url.get_secret_value() if settings.state.url else sqlite_url(settings.database_path)
        store = SqlStore(database)
        await store.start()
        opened.push_async_callback(store.close)

        vmm = QemuVmm(
            binary=settings.vmm.qemu_binary,
            accelerator=settings.vmm.accelerator,
            tb_size_mib=settings.vmm.tb_size_mib,
            guest_digest=guest.digest,
            command_timeout_s=settings.vmm.command_timeout_s,
        )
        opened.push_async_callback(vmm.close)
        fingerprint = await vmm.fingerprint()
        log.info("driver", **{name: getattr(fingerprint, name) for name in ("driver", "vmm_version", "accelerator")})

        slots = NetworkSlots(_network(settings), runtime)
        await slots.start()
        opened.push_async_callback(slots.close)

        registry = Registry(store)
        registry.listen(log_change)
        catalogue = Catalogue(store, storage)
        known = [*await store.sandboxes(), *await store.quarantined()]
        credentials = await asyncio.to_thread(load_credentials, settings, in_use=bool(known))
        api_key = await asyncio.to_thread(load_api_key, settings)
        operations = Operations()
        ahead = SpareSettings(settings.vmm.spares_low, settings.vmm.spares_high)
        spares = Spares(vmm, slots, clock, runtime / "vm", ahead, balloon=storage.balloon_safe)
        metrics.register(NodeStatistics(slots.statistics, operations.statistics, store.statistics, spares.statistics))
        host = Host(
            settings=_node_settings(settings, guest.kernel, guest.initramfs),
            clock=clock,
            store=store,
            registry=registry,
            catalogue=catalogue,
            storage=storage,
            slots=slots,
            vmm=vmm,
            fingerprint=fingerprint,
            agents=HttpAgents(),
            credentials=credentials,
            operations=operations,
            tasks=Tasks("node"),
            timings=Timings(metrics),
            collector=Collector(clock, registry, catalogue, storage),
            spares=spares,
        )
        node = NodeService(host)
        await node.start()
        opened.push_async_callback(node.stop)

        uploads = Uploads(
            host.settings.work_dir,
            reserve_bytes=settings.sandbox.min_free_disk_mib << 20,
            silence_s=settings.limits.body_timeout_s,
        )
        builds = BuildRoutes(TemplateBuilder(host, BuildLimits(**dict(settings.build))), uploads)
        api = create_app(node, _api(settings, api_key), builds=builds, registry=metrics, clock=clock)
        proxied = ProxyMetrics(metrics)
        proxy = Proxy(node, api, _proxy(settings, api_key), observe=proxied)
        proxied.show(proxy.statistics)
        registry.listen(lambda before, after: _forget_connections(proxy, before, after))
        opened.push_async_callback(proxy.close)
        yield node, proxy


async def _storage(settings: Settings) -> Storage:
    root, program = settings.paths.home / "storage", settings.storage.daemon_binary
    chosen = await asyncio.to_thread(look, settings.storage.backend, root, program)
    log.info("storage", back_end=chosen.back_end.value, because=chosen.reason)
    return open_storage(chosen, root, settings.paths.runtime / "storage", program)


def _forget_connections(proxy: Proxy, before: Sandbox | None, after: Sandbox | None) -> None:
    """A sandbox that stops running keeps no connection: its address will belong to another VM."""
    if before is not None and before.state.has_guest and (after is None or not after.state.has_guest):
        proxy.forget(before.id)


def _node_settings(settings: Settings, kernel: Path, initramfs: Path) -> NodeSettings:
    bundle = settings.guest.ca_bundle
    try:
        ca_bundle = CaBundle.of(bundle.read_text()) if bundle is not None else None
    except OSError as error:
        raise Invalid(f"guest.ca_bundle: {bundle} cannot be read: {error.strerror}") from error
    return NodeSettings(
        runtime_dir=settings.paths.runtime,
        work_dir=settings.paths.home / "work",
        kernel=kernel,
        initramfs=initramfs,
        node_id=settings.node.id or platform.node(),
        ca_bundle=ca_bundle,
        max_sandboxes=settings.sandbox.max_sandboxes,
        max_timeout_s=settings.sandbox.max_timeout_s,
        min_free_disk_mib=settings.sandbox.min_free_disk_mib,
        auto_resume_timeout_s=settings.sandbox.auto_resume_min_timeout_s,
        fork_max=settings.sandbox.fork_max,
        agent_timeout_s=settings.guest.init_timeout_s,
        freeze_timeout_s=settings.guest.freeze_timeout_s,
        operation_timeout_s=settings.sandbox.operation_timeout_s,
    )


def _network(settings: Settings) -> NetworkSettings:
    values = {name: value for name, value in settings.network if value is not None}
    return NetworkSettings(**values)


def _api(settings: Settings, api_key: str) -> ApiSettings:
    return ApiSettings(
        api_key=api_key,
        domain=client_domain(settings),
        max_body_bytes=settings.limits.max_body_bytes,
        body_timeout_s=settings.limits.body_timeout_s,
        cluster_id=settings.node.cluster_id,
        service_instance_id=settings.node.service_instance_id or str(uuid.uuid4()),
    )


def client_domain(settings: Settings) -> str | None:
    """Under which names clients are told to reach ports: ``{port}-{sandbox id}.{domain}``.

    Without one, E2B's clients fall back to the domain of a service that is not this
    server. So it is ``localhost`` where that leads here: names under it are loopback.
    None where the server listens on one address that is not, or on a port that is not known yet.
    """
    if settings.server.domains:
        return settings.server.domains[0]
    host = settings.server.listen_host
    try:
        address = ip_address(host)
    except ValueError:
        is_here = host == "localhost"
    else:
        is_here = address.is_loopback or address.is_unspecified
    port = settings.server.listen_port
    return f"localhost:{port}" if is_here and port else None


def _proxy(settings: Settings, api_key: str) -> ProxySettings:
    return ProxySettings(api_key=api_key, **dict(settings.proxy))
