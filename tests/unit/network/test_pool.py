"""The pool's decisions: any sequence of them keeps every index in exactly one place."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentenv.model.errors import Conflict, Exhausted, NotFound
from agentenv.model.policy import EgressPolicy
from agentenv.network.plan import network_plan
from agentenv.network.pool import Holding, SlotPool
from agentenv.network.settings import NetworkSettings

PLAN = network_plan(NetworkSettings(), Path("/unused"))
OPEN = EgressPolicy()
MOST = 6


def pool_of(low: int = 1, high: int = 2, most: int | None = MOST) -> SlotPool:
    return SlotPool(PLAN, warm_low=low, warm_high=high, most=most)


def fill(pool: SlotPool, waiting: int = 0) -> list[int]:
    made = []
    while (index := pool.next_to_make(waiting)) is not None:
        pool.made(index)
        made.append(index)
    return made


def test_the_pool_is_filled_to_the_high_mark_once_it_is_below_the_low_one() -> None:
    pool = pool_of(low=2, high=4, most=None)
    assert len(fill(pool)) == 4
    for owner, refilled in (("a", 0), ("b", 0), ("c", 3)):
        pool.take_warm(owner, OPEN)
        assert len(fill(pool)) == refilled, owner


def test_nothing_is_made_ahead_at_the_cap() -> None:
    pool = pool_of(low=4, high=4, most=3)
    assert len(fill(pool)) == 3
    for owner in "abc":
        assert pool.take_warm(owner, OPEN) is not None

    assert fill(pool, waiting=5) == []


def test_what_fails_is_tried_again_last() -> None:
    pool = pool_of(low=1, high=1)
    first = pool.next_to_make(0)
    assert first is not None
    pool.not_made(first)

    assert pool.next_to_make(0) != first


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go, slots are made or not, and a server restarts with some of them found."""

    holdings = Bundle("holdings")

    @initialize(low=st.integers(0, 3), extra=st.integers(0, 3), found=st.sets(st.integers(1, MOST), max_size=3))
    def begin(self, low: int, extra: int, found: set[int]) -> None:
        self.pool = pool_of(low, low + extra)
        self.pool.found(found)
        self.foreign = set(found)
        self.making: set[int] = set()
        self.owners = 0
        self.held: dict[int, Holding] = {}
        self.order: list[int] = []

    @rule(waiting=st.integers(0, 3))
    def make(self, waiting: int) -> None:
        index = self.pool.next_to_make(waiting)
        if index is not None:
            assert index not in self.making | self.held.keys() | self.foreign
            self.making.add(index)

    @precondition(lambda self: self.making)
    @rule(data=st.data(), works=st.booleans())
    def made(self, data: Any, works: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.making)))
        self.making.remove(index)
        (self.pool.made if works else self.pool.not_made)(index)

    @rule(target=holdings)
    def take(self) -> Any:
        self.owners += 1
        warm = self.pool.statistics().warm
        holding = self.pool.take_warm(f"owner-{self.owners}", OPEN)
        assert (holding is not None) == (warm > 0)
        if holding is not None:
            assert holding.index not in self.held
            self.held[holding.index] = holding
        return holding

    @rule(holding=holdings)
    def give_back(self, holding: Holding | None) -> None:
        if holding is None:
            return
        was_held = self.held.get(holding.index) is holding
        assert self.pool.give_back(holding) == was_held
        if was_held:
            del self.held[holding.index]

    @rule()
    def gone(self) -> None:
        self.pool.left(self.pool.leaving())

    @precondition(lambda self: self.foreign)
    @rule(target=holdings, data=st.data(), works=st.booleans())
    def adopt(self, data: Any, works: bool) -> Any:
        index = data.draw(st.sampled_from(sorted(self.foreign)))
        self.owners += 1
        holding = self.pool.adopt(index, f"owner-{self.owners}", OPEN)
        if not works:
            self.pool.adoption_failed(holding)
            return None
        self.foreign.remove(index)
        self.held[index] = holding
        return holding

    @rule(keep=st.sets(st.integers(1, MOST)))
    def reconcile(self, keep: set[int]) -> None:
        gone = self.pool.dismiss(keep)
        assert set(gone) == (self.foreign | self.held.keys()) - keep
        self.foreign &= keep
        self.held = {index: holding for index, holding in self.held.items() if index in keep}

    @rule(waiting=st.integers(0, 8))
    def wait(self, waiting: int) -> None:
        now = self.pool.statistics()
        free = MOST - now.held - now.foreign
        try:
            self.pool.check_can_wait(waiting)
        except Exhausted:
            assert waiting >= free
        else:
            assert waiting < free

    @invariant()
    def every_index_is_in_one_place(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        places = [
            list(pool._unused),
            list(pool._warm),
            list(pool._making),
            list(pool._leaving),
            list(pool._foreign),
            list(pool._held),
        ]
        everything = [index for place in places for index in place]
        assert len(everything) == len(set(everything)) == PLAN.capacity
        now = pool.statistics()
        assert now.warm + now.making + now.held + now.leaving <= MOST
        assert pool.held() == {holding.owner: index for index, holding in self.held.items()}


PoolMachine.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_who_has_a_slot_gets_no_other() -> None:
    pool = pool_of()
    pool.found([9])
    fill(pool)
    pool.take_warm("a", OPEN)

    with pytest.raises(Conflict):
        pool.take_warm("a", OPEN)
    with pytest.raises(Conflict):
        pool.adopt(9, "a", OPEN)
    with pytest.raises(NotFound):
        pool.adopt(8, "b", OPEN)


def test_only_a_held_slot_whose_policy_allows_it_resolves_names() -> None:
    pool = pool_of()
    fill(pool)
    holding = pool.take_warm("a", OPEN)
    assert holding is not None
    address = PLAN.slot(holding.index).address
    assert pool.holding_at(address) is holding

    allowed = []
    for policy in (OPEN, EgressPolicy(allow_internet=False)):
        holding.set_policy(policy)
        allowed.append(holding.dns)
    assert allowed == [True, False]

    pool.give_back(holding)
    assert pool.holding_at(address) is None
