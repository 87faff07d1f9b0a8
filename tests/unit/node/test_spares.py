"""The pool of VMMs that wait: what it holds, when it is filled, and that nothing of it is left."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.model.errors import Exhausted, NotFound, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.machine import Machine
from agentenv.model.policy import EgressPolicy
from agentenv.node.spares import Spares, SpareSettings
from agentenv.testing.audit import faults
from agentenv.testing.clock import JumpingClock
from agentenv.testing.host import MACHINE, FakeHost, Trip, World
from agentenv.testing.slots import FakeSlots
from agentenv.testing.vmm import FakeVmm

SMALL, LARGE = Machine(1, 64, 64), Machine(2, 128, 64)


async def full(spares: Spares, count: int, clock: JumpingClock | None = None) -> None:
    """Return when *count* VMMs wait; *clock* moves on meanwhile, for a pool that has failed and tries again."""
    while spares.statistics().waiting != count:
        await asyncio.sleep(0)
        if clock is not None:
            await clock.advance(0.1)


async def begun(tmp_path: Path, count: int = 2) -> FakeHost:
    fake = await FakeHost(World(tmp_path), spares=count).start()
    await full(fake.host.spares, count)
    return fake


def pool(tmp_path: Path, high: int, low: int | None = None) -> tuple[Spares, FakeVmm, FakeSlots]:
    vmm, slots = FakeVmm(), FakeSlots()
    settings = SpareSettings(high if low is None else low, high)
    return Spares(vmm, slots, JumpingClock(), tmp_path, settings, balloon=False), vmm, slots


def shapes(spares: Spares) -> list[int]:
    return sorted(spare.vmm.plan.machine.memory_mib for spare in spares.waiting())


async def test_every_way_to_start_takes_one_that_waits_and_another_takes_its_place(tmp_path: Path) -> None:
    fake = await begun(tmp_path)
    first = fake.host.spares.waiting()[0].vmm.process

    sandbox = await fake.create()
    assert fake.host.live[sandbox.id].instance.process == first
    await full(fake.host.spares, 2)
    await fake.node.pause(sandbox.id)
    await fake.node.resume(sandbox.id, 60)
    await full(fake.host.spares, 2)
    await fake.node.fork(sandbox.id, 2, 60)
    await full(fake.host.spares, 2)

    counted = fake.host.spares.statistics()
    assert (counted.hits, counted.misses, counted.broken) == (4, 0, 0)
    assert await faults(fake) == []
    await fake.stop()


async def test_the_slot_of_one_that_waited_has_the_policy_of_its_sandbox(tmp_path: Path) -> None:
    fake = await begun(tmp_path)
    closed = EgressPolicy(allow_internet=False)

    sandbox = await fake.create(egress=closed)

    assert fake.host.spares.statistics().hits == 1
    assert fake.world.slots.policies[fake.host.live[sandbox.id].slot.index] == closed
    await fake.stop()


async def test_a_stopped_server_leaves_no_vmm_that_waits(tmp_path: Path) -> None:
    fake = await begun(tmp_path)

    await fake.stop()

    assert fake.world.hypervisor.alive == []
    assert fake.world.slots.held() == {}
    assert list((tmp_path / "run/vm").iterdir()) == []


async def test_the_next_server_of_one_that_was_killed_removes_what_waited(tmp_path: Path) -> None:
    fake = await begun(tmp_path)
    left = [process.identity for process in fake.world.hypervisor.alive]
    assert len(left) == 2

    after = await (await fake.crash()).start()
    await full(after.host.spares, 2)

    assert not any(fake.world.hypervisor.processes[identity.pid].alive for identity in left)
    assert await faults(after) == []
    await after.stop()


@pytest.mark.parametrize("step", range(14))
async def test_a_start_that_breaks_leaves_neither_the_spare_nor_its_slot(tmp_path: Path, step: int) -> None:
    fake = await begun(tmp_path)
    with fake.taps.recorded() as calls:
        fake.taps.trip(step, Trip(error=Unavailable("broken")))
        try:
            await fake.create()
        except Unavailable:
            assert fake.node.sandboxes() == []
    assert step < 2 or "slots.hand_over" in calls

    await full(fake.host.spares, 2, fake.world.clock)
    assert await faults(fake) == []
    await fake.stop()


@pytest.mark.parametrize("step", range(14))
async def test_a_server_killed_in_a_start_leaves_neither_the_spare_nor_its_slot(tmp_path: Path, step: int) -> None:
    fake = await begun(tmp_path)
    with fake.taps.recorded():
        trip = fake.taps.trip(step, Trip())
        creating = asyncio.create_task(fake.create())
        reached = asyncio.create_task(trip.reached.wait())
        await asyncio.wait((creating, reached), return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        after = await fake.crash()
        await asyncio.wait((creating,))
        _ = creating.cancelled() or creating.exception()  # looked at: it is no error of the test

    await after.start()
    await full(after.host.spares, 2)

    assert all(sandbox.state is State.RUNNING for sandbox in after.node.sandboxes())
    assert await faults(after) == []
    await after.stop()


async def test_one_that_hangs_is_replaced_and_counted(tmp_path: Path) -> None:
    fake = await begun(tmp_path)
    fake.vmm.fail["furnish"] = Unavailable("it hangs")

    await fake.create()

    counted = fake.host.spares.statistics()
    assert (counted.hits, counted.broken) == (1, 1)
    await full(fake.host.spares, 2)
    assert await faults(fake) == []
    await fake.stop()


async def test_one_whose_slot_was_taken_apart_is_ended_and_the_start_goes_on(tmp_path: Path) -> None:
    fake = await begun(tmp_path)
    fake.world.slots.failures["hand_over"] = NotFound("gone")

    sandbox = await fake.create()

    assert sandbox.state is State.RUNNING
    await full(fake.host.spares, 2)
    assert await faults(fake) == []
    await fake.stop()


async def test_one_that_dies_while_it_waits_is_missed_and_replaced(tmp_path: Path) -> None:
    fake = await begun(tmp_path)
    victim = fake.host.spares.waiting()[0].vmm.process

    fake.world.hypervisor.processes[victim.pid].end(-9)
    while fake.host.spares.statistics().died == 0:
        await asyncio.sleep(0)
    await full(fake.host.spares, 2)

    assert await faults(fake) == []
    await fake.stop()


async def test_a_spare_gives_way_when_every_slot_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path, slots=FakeSlots(most=2))
    fake = await FakeHost(world, spares=1).start()
    await full(fake.host.spares, 1)
    another = replace(MACHINE, memory_mib=2)
    for _ in range(16):
        fake.host.spares.take(another)
    while shapes(fake.host.spares) != [2]:
        await asyncio.sleep(0)

    created = [await fake.create(), await fake.create()]

    assert {sandbox.state for sandbox in created} == {State.RUNNING}
    with pytest.raises(Exhausted):
        await fake.create()
    assert await faults(fake) == []
    await fake.stop()


async def test_nothing_is_started_ahead_while_something_starts(tmp_path: Path) -> None:
    spares, vmm, _ = pool(tmp_path, 1)
    with spares.starting():
        spares.start([SMALL])
        for _ in range(20):
            await asyncio.sleep(0)
        assert vmm.calls == []

    await full(spares, 1)
    await spares.close()


async def test_shapes_are_kept_in_proportion_to_what_was_wanted_last(tmp_path: Path) -> None:
    spares, _, slots = pool(tmp_path, 4)
    spares.start([SMALL])
    await full(spares, 4)
    assert shapes(spares) == [64] * 4

    for _ in range(3):
        assert spares.take(LARGE) is None
    while shapes(spares) != [64, 128, 128, 128]:
        await asyncio.sleep(0)
    for _ in range(32):
        spares.take(LARGE)
    while shapes(spares) != [128] * 4:
        await asyncio.sleep(0)

    assert len(slots.held()) >= 4
    await spares.close()


async def test_between_the_marks_nothing_is_started(tmp_path: Path) -> None:
    spares, vmm, _ = pool(tmp_path, 3, low=2)
    spares.start([SMALL])
    await full(spares, 3)
    made = len(vmm.calls)

    assert spares.take(SMALL) is not None
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(vmm.calls) == made
    assert spares.take(SMALL) is not None

    await full(spares, 3)
    await spares.close()


async def test_a_pool_of_none_takes_nothing_and_remembers_nothing(tmp_path: Path) -> None:
    spares, vmm, slots = pool(tmp_path, 0)
    spares.start([SMALL])

    assert spares.take(SMALL) is None

    assert (vmm.calls, slots.held(), spares.statistics().misses) == ([], {}, 0)
    await spares.close()


async def test_a_host_that_starts_none_is_asked_again_later(tmp_path: Path) -> None:
    clock, vmm, slots = JumpingClock(), FakeVmm(), FakeSlots()
    spares = Spares(vmm, slots, clock, tmp_path, SpareSettings(1, 1), balloon=False)
    vmm.fail["start_spare"] = Unavailable("no more processes")
    spares.start([SMALL])
    while spares.statistics().failures < 3:
        await clock.advance(1)
    assert slots.held() == {}

    del vmm.fail["start_spare"]

    await full(spares, 1, clock)
    await spares.close()
