"""The network of a node on this host: the slots, the forwarder of names, and a watch over what they share."""

from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from agentenv.aio.clock import Clock, SystemClock
from agentenv.aio.tasks import Tasks
from agentenv.model.errors import AgentEnvError, Unavailable
from agentenv.model.policy import EgressPolicy
from agentenv.network.contract import Slot
from agentenv.network.dns.forwarder import DnsForwarder, DnsStatistics, Limits
from agentenv.network.dns.upstream import Upstreams
from agentenv.network.host import HostFlows
from agentenv.network.plan import network_plan
from agentenv.network.pool import PoolStatistics, SlotPool
from agentenv.network.pooled import PooledSlots, SlotStatistics
from agentenv.network.settings import NetworkSettings
from agentenv.network.workshop import HostWorkshop, open_workshop

_CHECK_S: Final = 30.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NetworkStatistics:
    """For the metrics page. ``repairs`` counts how often the host's rules were gone and were put back."""

    pool: PoolStatistics
    slots: SlotStatistics
    dns: DnsStatistics
    flows: HostFlows
    repairs: int


@dataclass(frozen=True, slots=True)
class _Parts:
    slots: PooledSlots
    dns: DnsForwarder
    stack: AsyncExitStack


class NetworkSlots:
    """`Slots` made of network namespaces. Needs root's network capabilities.

    Args:
        runtime_dir: namespaces are kept under its ``netns``; the same after a restart.
    """

    def __init__(self, settings: NetworkSettings, runtime_dir: Path, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._plan = network_plan(settings, runtime_dir)
        self._clock = clock or SystemClock()
        self._parts: _Parts | None = None
        self._flows = HostFlows(0, 0)
        self._repairs = 0

    def __repr__(self) -> str:
        return f"<NetworkSlots {self._plan.prefix}: {self._parts.slots if self._parts else 'not started'}>"

    async def start(self) -> None:
        """Take the ranges, set up the host and make a first slot. Slots of an earlier process stay as they are.

        Raises `Conflict` (another server, or something else on the host, uses the
        ranges or the port), `Unsupported` (no capability, no tun, no nftables, no
        forwarding) or `Unavailable`, with a hint; nothing new is left on the host then.
        """
        settings, plan = self._settings, self._plan
        async with AsyncExitStack() as stack:
            workshop = await stack.enter_async_context(open_workshop(settings, plan, clock=self._clock))
            pool = SlotPool(plan, warm_low=settings.warm_low, warm_high=settings.warm_high, most=settings.max_slots)
            slots = PooledSlots(plan, pool, workshop, self._clock)
            stack.push_async_callback(slots.close)
            await slots.start()
            dns = DnsForwarder(
                plan.dns_address,
                plan.dns_port,
                upstreams=Upstreams(settings.dns_upstreams, own=plan.dns_address),
                admit=slots.resolves_names,
                limits=Limits(settings.dns_timeout_s, settings.dns_in_flight, settings.dns_in_flight_per_slot),
                clock=self._clock,
            )
            stack.push_async_callback(dns.close)
            await dns.start()
            watch = await stack.enter_async_context(Tasks("network"))
            watch.start("watch", self._watch(workshop))
            self._parts = _Parts(slots, dns, stack.pop_all())

    async def close(self) -> None:
        """Remove all that is not in use. Idempotent.

        Held slots stay, with their rules and the host's: their VMMs outlive the server.
        """
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.stack.aclose()

    async def acquire(self, owner: str, policy: EgressPolicy) -> Slot:
        return await self._slots().acquire(owner, policy)

    async def hand_over(self, slot: Slot, owner: str, policy: EgressPolicy) -> Slot:
        return await self._slots().hand_over(slot, owner, policy)

    async def adopt(self, owner: str, index: int, policy: EgressPolicy) -> Slot:
        return await self._slots().adopt(owner, index, policy)

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        await self._slots().apply(slot, policy)

    async def release(self, slot: Slot) -> None:
        if self._parts is not None:
            await self._parts.slots.release(slot)

    async def reconcile(self, keep: Collection[int]) -> int:
        return await self._slots().reconcile(keep)

    async def settled(self) -> None:
        if self._parts is not None:
            await self._parts.slots.settled()

    def held(self) -> dict[str, int]:
        return self._parts.slots.held() if self._parts is not None else {}

    def statistics(self) -> NetworkStatistics:
        """Raises `Unavailable` before `start` and after `close`."""
        pool, slots = self._slots().statistics()
        assert self._parts is not None
        return NetworkStatistics(pool, slots, self._parts.dns.statistics(), self._flows, self._repairs)

    def _slots(self) -> PooledSlots:
        if self._parts is None:
            raise Unavailable("the network is not started")
        return self._parts.slots

    async def _watch(self, workshop: HostWorkshop) -> None:
        """Firewalls are restarted and sysctls reset under a running server: put right what that undid."""
        while True:
            try:
                self._repairs += await workshop.converge()
                self._flows = await workshop.flows()
            except AgentEnvError as error:
                _log.warning("%s", error)
            await self._clock.sleep(_CHECK_S)
