"""Where slots are made, changed and removed, as the event loop sees it.

Two threads touch the host: one makes and removes slots, the other replaces
policies, so that a create with a policy of its own never waits behind the pool.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, Protocol

import structlog

from agentenv.aio.clock import Clock
from agentenv.model.errors import AgentEnvError
from agentenv.model.policy import EgressPolicy
from agentenv.network import maker
from agentenv.network.conntrack import Conntrack
from agentenv.network.egress import denied_to_all
from agentenv.network.host import HostFlows, HostNetwork, Leftovers
from agentenv.network.lock import NetworkLock
from agentenv.network.maker import SlotMaker, explained
from agentenv.network.nft import Nft
from agentenv.network.plan import NetworkPlan, SlotPlan
from agentenv.network.settings import NetworkSettings
from agentenv.network.worker import NamespaceThread

# How long the kernel may take to remove a slot before its link is cut by hand, and how often to look.
_VANISH_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.005

_log = structlog.get_logger(__name__)


class Workshop(Protocol):
    """What the pool needs done. A call that is cancelled has been carried out or has not, never half."""

    async def make(self, slot: SlotPlan) -> None:
        """Make *slot* with the default policy. Raises an error kind; nothing is left then."""
        ...

    async def replace_policy(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        """Raises an error kind; the old policy stays then."""
        ...

    async def is_whole(self, slot: SlotPlan) -> bool:
        """Whether the namespace and the link of *slot* are there: others clean up on a host, too."""
        ...

    async def repair(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        """Apply all rules of a slot that an earlier process made. Raises `NotFound` if it is gone."""
        ...

    async def remove(self, slots: Sequence[SlotPlan]) -> None:
        """Return when nothing of *slots* is left and their addresses are forgotten. May be repeated."""
        ...

    async def leftovers(self) -> Leftovers:
        """What is on the host under our names."""
        ...

    async def remove_strangers(self, leftovers: Leftovers) -> int:
        """Remove what no index leads to; return how many slots that were."""
        ...


class HostWorkshop:
    """The workshop on this host. `open_workshop` makes one."""

    def __init__(
        self,
        *,
        making: NamespaceThread,
        ruling: NamespaceThread,
        slot_maker: SlotMaker,
        host: HostNetwork,
        conntrack: Conntrack,
        clock: Clock,
    ) -> None:
        self._making = making
        self._ruling = ruling
        self._maker = slot_maker
        self._host = host
        self._conntrack = conntrack
        self._clock = clock

    async def make(self, slot: SlotPlan) -> None:
        try:
            await self._making.run(self._maker.make, slot, EgressPolicy())
        except AgentEnvError:
            # What failed is on its way out, or stands in the way: the index is ours, so nobody else has it.
            with suppress(AgentEnvError):
                await self.remove([slot])
            raise

    async def replace_policy(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        await self._ruling.run(self._maker.replace_policy, slot, policy)

    async def is_whole(self, slot: SlotPlan) -> bool:
        return await self._ruling.run(maker.is_whole, slot)

    async def repair(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        await self._making.run(self._maker.repair, slot, policy)

    async def remove(self, slots: Sequence[SlotPlan]) -> None:
        await self._making.run(maker.unkeep, slots)
        give_up = self._clock.monotonic() + _VANISH_S
        while left := await self._making.run(maker.still_attached, slots):
            if self._clock.monotonic() > give_up:
                _log.warning("something still runs in network slots %s: cut off", [slot.index for slot in left])
                await self._making.run(maker.detach, [slot.link for slot in left])
                break
            await self._clock.sleep(_LOOK_AGAIN_S)
        await self._making.run(_forget, self._conntrack, slots)

    async def leftovers(self) -> Leftovers:
        return await self._making.run(self._host.leftovers)

    async def remove_strangers(self, leftovers: Leftovers) -> int:
        return await self._making.run(leftovers.remove_strangers)

    async def converge(self) -> bool:
        """See `HostNetwork.converge`."""
        return await self._making.run(self._host.converge)

    async def flows(self) -> HostFlows:
        """See `HostNetwork.flows`."""
        return await self._making.run(self._host.flows)


@asynccontextmanager
async def open_workshop(settings: NetworkSettings, plan: NetworkPlan, *, clock: Clock) -> AsyncIterator[HostWorkshop]:
    """Hold the lock on the ranges, with the host set up, for the length of the block.

    After it what all slots share is removed too, unless a slot is still there.
    Raises `Conflict`, `Unsupported` or `Unavailable`; nothing is left then.
    """
    denied = denied_to_all(settings.always_denied, settings.allow_private, (plan.addresses, plan.links))
    flows = settings.flows_per_slot
    async with AsyncExitStack() as stack:
        making = NamespaceThread("slots-make")
        stack.push_async_callback(making.close)
        ruling = NamespaceThread("slots-rule")
        stack.push_async_callback(ruling.close)
        with explained("the network range cannot be locked"):
            lock = await making.run(NetworkLock.take, plan)
        stack.callback(lock.release)
        nft = Nft()
        stack.push_async_callback(asyncio.to_thread, nft.close)
        host = HostNetwork(plan, nft, denied=denied, flows_per_slot=flows)
        stack.push_async_callback(_clear, making, host)
        await making.run(host.prepare)
        conntrack = await making.run(_open_conntrack, plan)
        stack.callback(conntrack.close)
        mtu = settings.mtu if settings.mtu is not None else await making.run(host.mtu)
        slot_maker = SlotMaker(plan, nft, denied=denied, flows_per_slot=flows, mtu=mtu)
        yield HostWorkshop(
            making=making, ruling=ruling, slot_maker=slot_maker, host=host, conntrack=conntrack, clock=clock
        )


async def _clear(making: NamespaceThread, host: HostNetwork) -> None:
    try:
        if not (await making.run(host.leftovers)).slots:
            await making.run(host.clear)
    except AgentEnvError as error:
        # Never instead of the error that ended the block; the next start puts it right.
        _log.warning("%s", error)


def _open_conntrack(plan: NetworkPlan) -> Conntrack:
    """Tried once, so that a kernel that cannot do it says so before there are slots to forget."""
    with explained("this kernel's connection tracking cannot be controlled"):
        conntrack = Conntrack()
        try:
            conntrack.forget(plan.dns_address)
        except BaseException:
            conntrack.close()
            raise
        return conntrack


def _forget(conntrack: Conntrack, slots: Sequence[SlotPlan]) -> None:
    with explained("connections of removed network slots cannot be forgotten"):
        for slot in slots:
            conntrack.forget(slot.address)
