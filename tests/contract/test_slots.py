"""What every `Slots` promises: one suite over namespaces on this host and over the fake."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Protocol

import pytest

from agentenv.model.errors import Conflict, Exhausted, Invalid, NotFound
from agentenv.model.policy import EgressPolicy
from agentenv.network import netns
from agentenv.network.contract import Slot, Slots
from agentenv.network.settings import NetworkSettings
from agentenv.network.slots import NetworkSlots
from agentenv.testing.slots import FakeSlots
from tests.unit.network.lab import laid_out

MOST = 3
OPEN = EgressPolicy()
CLOSED = EgressPolicy(allow_internet=False)
TOO_LONG = EgressPolicy(deny_out=tuple(IPv4Network((index << 8, 32)) for index in range(5000)))


class Node(Protocol):
    """Slots, and what happens to them when their server is restarted."""

    slots: Slots

    async def restart(self) -> None: ...


class FakeNode:
    def __init__(self) -> None:
        self.slots: Slots = FakeSlots(most=MOST)

    async def restart(self) -> None:
        assert isinstance(self.slots, FakeSlots)
        self.slots = self.slots.restarted()


class RealNode:
    """Every start is on the same host and runtime directory; a restart leaves what is held."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self.slots: Slots = self._new()

    def _new(self) -> NetworkSlots:
        return NetworkSlots(NetworkSettings(warm_low=1, warm_high=1, max_slots=MOST), self._runtime)

    async def start(self) -> None:
        assert isinstance(self.slots, NetworkSlots)
        await self.slots.start()

    async def close(self) -> None:
        assert isinstance(self.slots, NetworkSlots)
        await self.slots.close()

    async def restart(self) -> None:
        await self.close()
        self.slots = self._new()
        await self.start()


@pytest.fixture(
    params=["fake", pytest.param("real", marks=[pytest.mark.needs("root", "netns", "nft", "tun"), pytest.mark.slow])]
)
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    if request.param == "fake":
        yield FakeNode()
        return
    with laid_out():
        real = RealNode(tmp_path)
        await real.start()
        yield real
        await real.close()
        for path in (tmp_path / "netns").iterdir():
            netns.remove(path)


async def test_a_slot_is_held_by_its_owner_until_it_is_released(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)
    assert (slot.owner, node.slots.held()) == ("one", {"one": slot.index})

    await node.slots.release(slot)

    assert node.slots.held() == {}


async def test_two_owners_share_nothing(node: Node) -> None:
    one, two = await node.slots.acquire("one", OPEN), await node.slots.acquire("two", CLOSED)

    assert one.index != two.index
    assert one.address != two.address
    assert one.netns != two.netns


async def test_one_owner_has_one_slot(node: Node) -> None:
    await node.slots.acquire("one", OPEN)

    with pytest.raises(Conflict):
        await node.slots.acquire("one", OPEN)


async def test_more_than_there_can_be_is_exhausted_and_a_release_makes_room(node: Node) -> None:
    taken = [await node.slots.acquire(f"owner-{number}", OPEN) for number in range(MOST)]
    with pytest.raises(Exhausted):
        await node.slots.acquire("one-more", OPEN)
    assert len(node.slots.held()) == MOST

    await node.slots.release(taken[0])

    assert (await node.slots.acquire("one-more", OPEN)).owner == "one-more"


async def test_an_index_comes_back_as_late_as_possible(node: Node) -> None:
    seen = []
    for number in range(4 * MOST):
        slot = await node.slots.acquire(f"owner-{number}", OPEN)
        seen.append(slot.index)
        await node.slots.release(slot)
        await node.slots.settled()

    assert len(set(seen)) == len(seen)


async def test_many_at_once_get_different_slots_or_are_told_that_there_is_none(node: Node) -> None:
    outcomes = await asyncio.gather(
        *(node.slots.acquire(f"owner-{number}", OPEN) for number in range(3 * MOST)), return_exceptions=True
    )

    slots = [outcome for outcome in outcomes if isinstance(outcome, Slot)]
    assert len({slot.index for slot in slots}) == len(slots) == MOST
    assert [outcome for outcome in outcomes if not isinstance(outcome, Slot | Exhausted)] == []


async def test_releasing_twice_is_releasing_once(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)
    await node.slots.release(slot)
    again = await node.slots.acquire("two", OPEN)

    await node.slots.release(slot)

    assert node.slots.held() == {"two": again.index}


async def test_nobody_releases_the_slot_of_another_owner(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)

    await node.slots.release(Slot(index=slot.index, address=slot.address, netns=slot.netns, owner="two"))

    assert node.slots.held() == {"one": slot.index}


async def test_a_slot_that_is_handed_over_is_the_new_owner_s_alone(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)

    handed = await node.slots.hand_over(slot, "two", CLOSED)

    assert (handed.owner, handed.index, handed.netns) == ("two", slot.index, slot.netns)
    await node.slots.release(slot)  # of the old owner: nothing happens
    assert node.slots.held() == {"two": slot.index}
    await node.slots.apply(handed, OPEN)
    await node.slots.release(handed)
    assert node.slots.held() == {}


async def test_a_slot_is_not_handed_over_by_a_stranger_or_to_an_owner_of_one(node: Node) -> None:
    slot, other = await node.slots.acquire("one", OPEN), await node.slots.acquire("two", OPEN)

    with pytest.raises(Conflict):
        await node.slots.hand_over(slot, "two", OPEN)
    with pytest.raises(NotFound):
        await node.slots.hand_over(replace(slot, owner="three"), "four", OPEN)
    with pytest.raises(Invalid):
        await node.slots.hand_over(slot, "four", TOO_LONG)

    assert node.slots.held() == {"one": slot.index, "two": other.index}


async def test_a_policy_can_be_replaced_while_the_slot_is_held_and_not_after(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)
    await node.slots.apply(slot, CLOSED)
    await node.slots.apply(slot, OPEN)
    await node.slots.release(slot)

    with pytest.raises(NotFound):
        await node.slots.apply(slot, CLOSED)


@pytest.mark.parametrize("verb", ["acquire", "apply", "adopt"])
async def test_a_policy_that_cannot_be_changes_nothing(node: Node, verb: str) -> None:
    slot = await node.slots.acquire("one", OPEN)
    attempts: dict[str, Callable[[], object]] = {
        "acquire": lambda: node.slots.acquire("two", TOO_LONG),
        "apply": lambda: node.slots.apply(slot, TOO_LONG),
        "adopt": lambda: node.slots.adopt("two", 7, TOO_LONG),
    }

    with pytest.raises(Invalid):
        await attempts[verb]()  # type: ignore[misc]

    assert node.slots.held() == {"one": slot.index}


async def test_a_held_slot_outlives_the_server_and_is_adopted_as_it_was(node: Node) -> None:
    slot = await node.slots.acquire("one", CLOSED)

    await node.restart()
    assert node.slots.held() == {}
    assert await node.slots.adopt("one", slot.index, CLOSED) == slot

    assert node.slots.held() == {"one": slot.index}


async def test_a_slot_that_waits_to_be_adopted_is_given_to_nobody(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)
    await node.restart()

    others = [await node.slots.acquire(f"owner-{number}", OPEN) for number in range(MOST - 1)]
    with pytest.raises(Exhausted):
        await node.slots.acquire("one-more", OPEN)

    assert slot.index not in {other.index for other in others}


async def test_a_slot_is_adopted_once(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)
    await node.restart()
    await node.slots.adopt("one", slot.index, OPEN)

    with pytest.raises(Conflict):
        await node.slots.adopt("two", slot.index, OPEN)
    with pytest.raises(Conflict):
        await node.slots.adopt("one", slot.index, OPEN)


@pytest.mark.parametrize("index", [-1, 0, 2, 40_000, 10**9])
async def test_what_was_never_there_cannot_be_adopted(node: Node, index: int) -> None:
    with pytest.raises(NotFound):
        await node.slots.adopt("one", index, OPEN)

    assert node.slots.held() == {}


async def test_reconciling_removes_what_is_not_kept_and_says_how_many(node: Node) -> None:
    kept, dead, lost = [await node.slots.acquire(name, OPEN) for name in ("kept", "dead", "lost")]
    await node.restart()
    await node.slots.adopt("kept", kept.index, OPEN)
    await node.slots.adopt("dead", dead.index, OPEN)

    assert await node.slots.reconcile([kept.index]) == 2

    assert node.slots.held() == {"kept": kept.index}
    with pytest.raises(NotFound):
        await node.slots.adopt("lost", lost.index, OPEN)
    assert await node.slots.reconcile([kept.index]) == 0


async def test_a_kept_slot_can_still_be_adopted_after_reconciling(node: Node) -> None:
    slot = await node.slots.acquire("one", OPEN)
    await node.restart()

    assert await node.slots.reconcile([slot.index]) == 0
    assert await node.slots.adopt("one", slot.index, OPEN) == slot


async def test_a_caller_that_gives_up_has_nothing(node: Node) -> None:
    for delay in range(20):
        acquiring = asyncio.create_task(node.slots.acquire("one", CLOSED))
        for _ in range(delay):
            await asyncio.sleep(0)
        acquiring.cancel()
        with suppress(asyncio.CancelledError):
            await node.slots.release(await acquiring)

        assert node.slots.held() == {}
        await node.slots.settled()
