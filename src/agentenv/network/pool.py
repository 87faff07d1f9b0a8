"""Which slots there are and who has them: every decision of the pool, with no I/O.

A slot is unused, being made, warm, held or leaving; each index is in one of these
at a time. Indexes go round: one that was given back is the last to be used again,
so whoever still has its address finds nobody there for as long as possible.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address

from agentenv.model.errors import Bug, Conflict, Exhausted, NotFound
from agentenv.model.policy import EgressPolicy
from agentenv.network.egress import compile_policy
from agentenv.network.plan import NetworkPlan


@dataclass(slots=True)
class Holding:
    """A slot that someone has, and the policy that is in force in it."""

    owner: str
    index: int
    policy: EgressPolicy
    dns: bool

    def set_policy(self, policy: EgressPolicy) -> None:
        self.policy = policy
        self.dns = compile_policy(policy).dns


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """How many slots are in each state now. ``foreign`` ones were found on the host and not claimed yet."""

    warm: int
    making: int
    held: int
    leaving: int
    foreign: int


class SlotPool:
    """The state of every index of *plan*.

    Args:
        warm_low: fewer warm slots than this and more are wanted.
        warm_high: how many are wanted then.
        most: most slots in existence at a time.
    """

    def __init__(self, plan: NetworkPlan, *, warm_low: int, warm_high: int, most: int | None) -> None:
        self._plan = plan
        self._warm_low = warm_low
        self._warm_high = warm_high
        self._most = min(plan.capacity, most or plan.capacity)
        self._unused = deque(range(1, plan.capacity + 1))
        self._warm: deque[int] = deque()
        self._making: set[int] = set()
        self._leaving: set[int] = set()
        self._foreign: set[int] = set()
        self._held: dict[int, Holding] = {}
        self._owners: dict[str, int] = {}
        self._filling = True

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<SlotPool: {now.held} held, {now.warm} warm, {now.making} being made, {now.leaving} leaving>"

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            len(self._warm), len(self._making), len(self._held), len(self._leaving), len(self._foreign)
        )

    def held(self) -> dict[str, int]:
        return dict(self._owners)

    def holding(self, index: int, owner: str) -> Holding | None:
        """The slot *index*, if *owner* has it."""
        holding = self._held.get(index)
        return holding if holding is not None and holding.owner == owner else None

    def holding_at(self, address: IPv4Address) -> Holding | None:
        """Who has the slot whose guest *address* stands for."""
        index = self._plan.index_of_address(address)
        return self._held.get(index) if index is not None else None

    def own(self) -> set[int]:
        """All indexes that are in this pool's hands."""
        return {*self._warm, *self._making, *self._held, *self._leaving}

    # Making

    def next_to_make(self, waiting: int) -> int | None:
        """The index to make a slot at now, if one is wanted (*waiting* callers want one each) and may exist."""
        if len(self._warm) < self._warm_low:
            self._filling = True
        if len(self._warm) >= self._warm_high:
            self._filling = False
        wanted = waiting > len(self._warm) or (self._filling and len(self._warm) < self._warm_high)
        if not wanted or not self._unused or self._existing() >= self._most:
            return None
        index = self._unused.popleft()
        self._making.add(index)
        return index

    def made(self, index: int) -> None:
        self._making.remove(index)
        self._warm.append(index)

    def not_made(self, index: int) -> None:
        self._making.remove(index)
        self._unused.append(index)

    # Holding

    def check_can_hold(self, owner: str) -> None:
        """Raises `Conflict` if *owner* has a slot."""
        if owner in self._owners:
            raise Conflict(f"{owner} has network slot {self._owners[owner]} already")

    def take_warm(self, owner: str, policy: EgressPolicy) -> Holding | None:
        """Give *owner* the slot that has been warm the longest, if there is one."""
        self.check_can_hold(owner)
        if not self._warm:
            return None
        return self._hold(self._warm.popleft(), owner, policy)

    def hand_over(self, holding: Holding, owner: str, policy: EgressPolicy) -> Holding:
        """Let *owner* have the slot of *holding*, which is no holding any more."""
        self.check_can_hold(owner)
        if self._held.get(holding.index) is not holding:
            raise NotFound(f"network slot {holding.index} is not held by {holding.owner}")
        del self._held[holding.index]
        del self._owners[holding.owner]
        return self._hold(holding.index, owner, policy)

    def check_can_wait(self, waiting: int) -> None:
        """Raises `Exhausted` if, beside the *waiting* callers, there is no slot to come for one more."""
        to_come = len(self._warm) + len(self._making) + len(self._leaving)
        to_come += min(len(self._unused), max(0, self._most - self._existing()))
        if waiting >= to_come:
            raise Exhausted(
                f"all {self._most} network slots of this node are taken",
                hint="delete or pause sandboxes, or widen network address_cidr and veth_cidr, or raise max_slots",
            )

    def give_back(self, holding: Holding) -> bool:
        """Its slot leaves; False if *holding* was given back before."""
        if self._held.get(holding.index) is not holding:
            return False
        del self._held[holding.index]
        del self._owners[holding.owner]
        self._leaving.add(holding.index)
        return True

    # Leaving

    def leaving(self) -> list[int]:
        return sorted(self._leaving)

    def left(self, indexes: Iterable[int]) -> None:
        """They are gone from the host, and can be used again, as late as possible."""
        for index in indexes:
            self._leaving.remove(index)
            self._unused.append(index)

    def dismiss_free(self) -> None:
        """All slots that nobody has leave, and no more are wanted ahead of need."""
        self._leaving.update(self._warm, self._making)
        self._warm.clear()
        self._making.clear()
        self._warm_low = self._warm_high = 0

    # What was there before this process

    def found(self, indexes: Collection[int]) -> None:
        """*indexes* exist on the host, made by an earlier process: hands off, until adopted or reconciled."""
        new = set(indexes) - self.own()
        self._foreign |= new
        self._unused = deque(index for index in self._unused if index not in new)

    def adopt(self, index: int, owner: str, policy: EgressPolicy) -> Holding:
        """Raises `Conflict` if the slot or the owner is not free for that, `NotFound` if it was not found."""
        self.check_can_hold(owner)
        if index in self._foreign:
            self._foreign.remove(index)
            return self._hold(index, owner, policy)
        if (holding := self._held.get(index)) is not None:
            raise Conflict(f"network slot {index} is held by {holding.owner}")
        raise NotFound(f"network slot {index} is not one of an earlier process")

    def adoption_failed(self, holding: Holding) -> None:
        """It is as it was found."""
        del self._held[holding.index]
        del self._owners[holding.owner]
        self._foreign.add(holding.index)

    def dismiss(self, keep: Collection[int]) -> list[int]:
        """Found and held slots that are not in *keep* leave; return them."""
        keep = set(keep)
        found = self._foreign - keep
        self._foreign -= found
        self._leaving |= found
        held = [holding for index, holding in self._held.items() if index not in keep]
        for holding in held:
            self.give_back(holding)
        return sorted([*found, *(holding.index for holding in held)])

    def _hold(self, index: int, owner: str, policy: EgressPolicy) -> Holding:
        if index in self._held:
            raise Bug(f"network slot {index} would be held twice")
        holding = Holding(owner, index, policy, compile_policy(policy).dns)
        self._held[index] = holding
        self._owners[owner] = index
        return holding

    def _existing(self) -> int:
        return len(self._warm) + len(self._making) + len(self._held) + len(self._leaving) + len(self._foreign)
