"""The verbs and the background work, on a workshop that a test can hold up and break."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.aio.failpoints import REGISTRY, Raise
from agentenv.model.errors import Bug, DeadlineExceeded, Exhausted, NotFound, Unavailable
from agentenv.model.policy import EgressPolicy
from agentenv.network.host import Leftovers
from agentenv.network.plan import SlotPlan, network_plan
from agentenv.network.pool import SlotPool
from agentenv.network.pooled import PooledSlots
from agentenv.network.settings import NetworkSettings
from agentenv.testing.clock import JumpingClock

PLAN = network_plan(NetworkSettings(), Path("/unused"))
OPEN = EgressPolicy()
CLOSED = EgressPolicy(allow_internet=False)
NOTHING = Leftovers(frozenset(), (), ())


class Bench:
    """A workshop without a host. What it is told to fail at, fails; what it is told to hold, waits."""

    def __init__(self) -> None:
        self.there: dict[int, EgressPolicy] = {}
        self.failures: dict[str, list[Exception]] = {}
        self.open = {name: asyncio.Event() for name in ("make", "policy", "repair", "remove")}
        for gate in self.open.values():
            gate.set()
        self.left = NOTHING

    async def _pass(self, name: str) -> None:
        await self.open[name].wait()
        if self.failures.get(name):
            raise self.failures[name].pop(0)

    async def make(self, slot: SlotPlan) -> None:
        await self._pass("make")
        assert slot.index not in self.there
        self.there[slot.index] = OPEN

    async def replace_policy(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        await self._pass("policy")
        self.there[slot.index] = policy

    async def is_whole(self, slot: SlotPlan) -> bool:
        return slot.index in self.there

    async def repair(self, slot: SlotPlan, policy: EgressPolicy) -> None:
        await self._pass("repair")
        self.there[slot.index] = policy

    async def remove(self, slots: Sequence[SlotPlan]) -> None:
        await self._pass("remove")
        for slot in slots:
            self.there.pop(slot.index, None)

    async def leftovers(self) -> Leftovers:
        return self.left

    async def remove_strangers(self, leftovers: Leftovers) -> int:
        return len(leftovers.files)


class World:
    def __init__(self, *, low: int = 1, high: int = 2, most: int | None = 4) -> None:
        self.bench = Bench()
        self.clock = JumpingClock()
        self.pool = SlotPool(PLAN, warm_low=low, warm_high=high, most=most)
        self.slots = PooledSlots(PLAN, self.pool, self.bench, self.clock)

    async def quiet(self) -> None:
        """Let everything that can run do so."""
        for _ in range(200):
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.slots.start()
    await made.quiet()
    yield made
    for gate in made.bench.open.values():
        gate.set()
    made.bench.failures.clear()
    await made.slots.close()
    assert set(made.bench.there) == set(made.slots.held().values())


async def test_a_warm_slot_is_handed_over_without_touching_the_host(world: World) -> None:
    world.bench.open["make"].clear()
    world.bench.open["policy"].clear()

    slot = await world.slots.acquire("one", OPEN)

    assert slot.index in world.bench.there
    assert world.slots.statistics()[1].hits == 1


async def test_a_warm_slot_that_was_taken_apart_is_not_handed_out(world: World) -> None:
    first, second = sorted(world.bench.there)
    del world.bench.there[first]

    assert (await world.slots.acquire("one", OPEN)).index == second

    await world.slots.settled()
    assert world.slots.held() == {"one": second}
    assert world.slots.statistics()[1].failures == 1


async def test_a_slot_that_was_taken_apart_changes_no_owner(world: World) -> None:
    slot = await world.slots.acquire("one", OPEN)
    del world.bench.there[slot.index]

    with pytest.raises(NotFound):
        await world.slots.hand_over(slot, "two", OPEN)

    assert world.slots.held() == {"one": slot.index}
    await world.slots.release(slot)


async def test_who_finds_none_warm_gets_the_next_that_is_made_in_turn(world: World) -> None:
    world.bench.open["make"].clear()
    for name in ("a", "b"):
        await world.slots.acquire(name, OPEN)
    waiting = [asyncio.create_task(world.slots.acquire(name, OPEN)) for name in ("c", "d")]
    await world.quiet()
    assert not any(task.done() for task in waiting)

    world.bench.open["make"].set()
    got = [await task for task in waiting]

    assert [slot.owner for slot in got] == ["c", "d"]
    assert got[0].index < got[1].index
    assert world.slots.statistics()[1].misses == 2


async def test_a_release_serves_who_waits_at_the_cap(world: World) -> None:
    held = [await world.slots.acquire(name, OPEN) for name in "abcd"]
    world.bench.open["remove"].clear()
    await world.slots.release(held[0])

    waiting = asyncio.create_task(world.slots.acquire("e", OPEN))
    await world.quiet()
    assert not waiting.done()
    with pytest.raises(Exhausted):
        await world.slots.acquire("f", OPEN)
    world.bench.open["remove"].set()

    assert (await waiting).owner == "e"


async def test_nothing_waits_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.network.pooled._WAIT_S", 0.01)
    world.bench.open["make"].clear()
    for name in ("a", "b"):
        await world.slots.acquire(name, OPEN)

    with pytest.raises(DeadlineExceeded):
        await world.slots.acquire("c", OPEN)

    assert set(world.slots.held()) == {"a", "b"}


@pytest.mark.parametrize("gate", ["make", "policy"])
async def test_a_caller_that_gives_up_while_waiting_takes_nothing(world: World, gate: str) -> None:
    world.bench.open[gate].clear()
    if gate == "make":
        for name in ("a", "b"):
            await world.slots.acquire(name, OPEN)
    before = world.slots.held()
    acquiring = asyncio.create_task(world.slots.acquire("late", CLOSED))
    await world.quiet()
    assert not acquiring.done()

    acquiring.cancel()
    with suppress(asyncio.CancelledError):
        await acquiring
    world.bench.open[gate].set()
    await world.quiet()

    assert world.slots.held() == before
    assert set(world.bench.there) == world.pool.own()


async def test_a_slot_handed_over_in_the_moment_of_cancelling_goes_back(world: World) -> None:
    world.bench.open["make"].clear()
    for name in ("a", "b"):
        await world.slots.acquire(name, OPEN)
    acquiring = asyncio.create_task(world.slots.acquire("late", OPEN))
    await world.quiet()
    world.slots._made(world.pool.next_to_make(1) or next(iter(world.pool._making)))
    assert "late" in world.slots.held()

    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring

    assert "late" not in world.slots.held()
    world.pool._making.clear()


async def test_a_failed_policy_gives_the_slot_back(world: World) -> None:
    world.bench.failures["policy"] = [Unavailable("injected")]

    with pytest.raises(Unavailable, match="injected"):
        await world.slots.acquire("one", CLOSED)
    await world.slots.settled()

    assert world.slots.held() == {}
    assert (await world.slots.acquire("one", CLOSED)).owner == "one"


async def test_a_failure_after_the_slot_was_taken_gives_it_back(world: World) -> None:
    with REGISTRY.armed("slots.acquired", Raise(Bug("injected"))), pytest.raises(Bug):
        await world.slots.acquire("one", OPEN)

    assert world.slots.held() == {}


async def test_one_spoiled_index_is_passed_over(world: World) -> None:
    world.bench.failures["make"] = [Unavailable("spoiled")]
    for name in ("a", "b"):
        await world.slots.acquire(name, OPEN)

    assert (await world.slots.acquire("c", OPEN)).owner == "c"
    assert world.slots.statistics()[1].failures == 1


@pytest.mark.parametrize("error", [Unavailable("the host cannot"), RuntimeError("a mistake")])
async def test_when_no_slot_can_be_made_callers_are_told_and_it_is_tried_again_with_pauses(
    world: World, error: Exception
) -> None:
    world.bench.open["make"].clear()
    world.bench.failures["make"] = [error] * 5
    for name in ("a", "b"):
        await world.slots.acquire(name, OPEN)
    waiting = asyncio.create_task(world.slots.acquire("c", OPEN))
    await world.quiet()
    world.bench.open["make"].set()

    with pytest.raises(Unavailable, match=str(error)):
        await waiting
    assert len(world.bench.failures["make"]) == 2  # three tries in a row, then a pause

    await world.clock.advance(0.1)
    assert len(world.bench.failures["make"]) == 1
    await world.clock.advance(0.1)
    assert len(world.bench.failures["make"]) == 1  # the pause has grown
    await world.clock.advance(10)
    assert (await world.slots.acquire("c", OPEN)).owner == "c"


async def test_what_cannot_be_removed_is_tried_again_and_not_given_out(world: World) -> None:
    slot = await world.slots.acquire("one", OPEN)
    world.bench.failures["remove"] = [Unavailable("busy"), RuntimeError("a mistake")]

    await world.slots.release(slot)
    await world.quiet()
    assert slot.index in world.bench.there
    assert world.pool.statistics().leaving == 1
    await world.clock.advance(10)
    await world.slots.settled()

    assert slot.index not in world.bench.there


async def test_a_caller_that_hangs_up_leaves_rules_and_record_the_same(world: World) -> None:
    slot = await world.slots.acquire("one", OPEN)
    world.bench.open["policy"].clear()
    applying = asyncio.create_task(world.slots.apply(slot, CLOSED))
    await world.quiet()
    applying.cancel()
    with suppress(asyncio.CancelledError):
        await applying
    world.bench.open["policy"].set()
    await world.quiet()

    assert world.bench.there[slot.index] == CLOSED
    assert world.slots.resolves_names(slot.address) is None


async def test_a_failed_change_of_policy_changes_nothing(world: World) -> None:
    slot = await world.slots.acquire("one", OPEN)
    world.bench.failures["policy"] = [Unavailable("injected")]

    with pytest.raises(Unavailable):
        await world.slots.apply(slot, CLOSED)

    assert world.slots.resolves_names(slot.address) == slot.index


async def test_a_failed_adoption_can_be_repeated_unless_the_slot_is_gone() -> None:
    world = World(low=0, high=0)
    world.bench.left = Leftovers(frozenset({7}), (), ())
    world.bench.there[7] = OPEN
    await world.slots.start()
    world.bench.failures["repair"] = [Unavailable("busy"), NotFound("gone")]

    with pytest.raises(Unavailable):
        await world.slots.adopt("one", 7, OPEN)
    with pytest.raises(NotFound, match="gone"):
        await world.slots.adopt("one", 7, OPEN)
    await world.slots.settled()

    assert 7 not in world.bench.there
    with pytest.raises(NotFound):
        await world.slots.adopt("one", 7, OPEN)
    await world.slots.close()


async def test_a_start_that_fails_leaves_nothing() -> None:
    world = World()
    world.bench.failures["make"] = [Unavailable("the host cannot")]

    with pytest.raises(Unavailable):
        await world.slots.start()

    assert world.bench.there == {}
    await world.slots.close()


async def test_closing_tells_who_waits_and_removes_what_nobody_has(world: World) -> None:
    held = await world.slots.acquire("a", OPEN)
    await world.slots.acquire("b", OPEN)
    world.bench.open["make"].clear()
    waiting = asyncio.create_task(world.slots.acquire("c", OPEN))
    await world.quiet()

    await world.slots.close()

    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await world.slots.acquire("d", OPEN)
    assert held.index in world.bench.there
    assert set(world.bench.there) == set(world.slots.held().values())


async def test_a_slot_is_made_again_at_once_when_one_is_taken(world: World) -> None:
    before = world.slots.statistics()[1].made
    await world.slots.acquire("a", OPEN)
    await world.slots.acquire("b", OPEN)
    await world.quiet()

    assert world.pool.statistics().warm == 2
    assert world.slots.statistics()[1].made == before + 2
