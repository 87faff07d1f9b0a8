"""Slots without a network: the promises of `Slots`, in memory, with a simulated restart."""

from collections.abc import Collection
from ipaddress import IPv4Network
from pathlib import Path

from agentenv.model.errors import AgentEnvError, NotFound
from agentenv.model.policy import EgressPolicy
from agentenv.network.contract import Slot
from agentenv.network.egress import compile_policy
from agentenv.network.plan import network_plan
from agentenv.network.pool import Holding, SlotPool
from agentenv.network.settings import NetworkSettings


class FakeSlots:
    """A node's slots that exist only here.

    A verb fails once with what a test puts into `failures` under its name. `policies`
    are those in force, by index. `restarted` is what a new process would find.

    Args:
        most: how many there can be.
    """

    def __init__(self, *, most: int = 1000, found: Collection[int] = ()) -> None:
        settings = NetworkSettings(address_cidr=IPv4Network("127.11.0.0/16"), veth_cidr=IPv4Network("127.12.0.0/16"))
        self._most = most
        self._plan = network_plan(settings, Path("/nonexistent"))
        self._pool = SlotPool(self._plan, warm_low=0, warm_high=0, most=most)
        self._pool.found(found)
        self.failures: dict[str, AgentEnvError] = {}
        self.policies: dict[int, EgressPolicy] = {}

    async def start(self) -> None:
        self._fail("start")

    async def close(self) -> None:
        self._fail("close")

    async def acquire(self, owner: str, policy: EgressPolicy) -> Slot:
        compile_policy(policy)
        self._fail("acquire")
        self._pool.check_can_hold(owner)
        self._pool.check_can_wait(waiting=0)
        if (index := self._pool.next_to_make(waiting=1)) is not None:
            self._pool.made(index)
        holding = self._pool.take_warm(owner, policy)
        assert holding is not None
        self.policies[holding.index] = policy
        return self._slot(holding)

    async def hand_over(self, slot: Slot, owner: str, policy: EgressPolicy) -> Slot:
        compile_policy(policy)
        self._fail("hand_over")
        before = self._pool.holding(slot.index, slot.owner)
        if before is None:
            raise NotFound(f"network slot {slot.index} is not held by {slot.owner or 'anyone'}")
        holding = self._pool.hand_over(before, owner, policy)
        self.policies[holding.index] = policy
        return self._slot(holding)

    async def adopt(self, owner: str, index: int, policy: EgressPolicy) -> Slot:
        compile_policy(policy)
        self._fail("adopt")
        holding = self._pool.adopt(index, owner, policy)
        self.policies[index] = policy
        return self._slot(holding)

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        compile_policy(policy)
        self._fail("apply")
        holding = self._pool.holding(slot.index, slot.owner)
        if holding is None:
            raise NotFound(f"network slot {slot.index} is not held by {slot.owner or 'anyone'}")
        holding.set_policy(policy)
        self.policies[slot.index] = policy

    async def release(self, slot: Slot) -> None:
        holding = self._pool.holding(slot.index, slot.owner)
        if holding is not None and self._pool.give_back(holding):
            self._gone()

    async def reconcile(self, keep: Collection[int]) -> int:
        self._fail("reconcile")
        gone = self._pool.dismiss(keep)
        self._gone()
        return len(gone)

    async def settled(self) -> None:
        """Nothing takes time here."""

    def held(self) -> dict[str, int]:
        return self._pool.held()

    def restarted(self) -> "FakeSlots":
        """The slots as the next process finds them: all that were held are on the host still."""
        return FakeSlots(most=self._most, found=self._pool.own())

    def _gone(self) -> None:
        for index in self._pool.leaving():
            self.policies.pop(index, None)
        self._pool.left(self._pool.leaving())

    def _slot(self, holding: Holding) -> Slot:
        return self._plan.slot(holding.index).held_by(holding.owner)

    def _fail(self, verb: str) -> None:
        error = self.failures.pop(verb, None)
        if error is not None:
            raise error
