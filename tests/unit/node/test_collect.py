"""The collector: soon after something became garbage, once for many changes, and never what is needed."""

import asyncio

import pytest

from agentenv.model.errors import Unavailable
from agentenv.model.lifecycle import State
from agentenv.node.collect import RETRY_S, SETTLE_S
from agentenv.state.contract import Quarantined
from agentenv.testing.host import FakeHost, Trip, World


async def test_deleting_many_costs_one_pass(fake: FakeHost) -> None:
    sandboxes = [await fake.create() for _ in range(10)]
    for sandbox in sandboxes:
        await fake.node.pause(sandbox.id)
    await fake.world.clock.advance(SETTLE_S)
    before = fake.taps.calls.count("storage.collect")

    for sandbox in sandboxes:
        await fake.node.delete(sandbox.id)
    await fake.world.clock.advance(SETTLE_S)

    assert fake.taps.calls.count("storage.collect") == before + 1
    assert len(fake.world.storage.blobs) == 1  # that of the template


async def test_the_capture_of_a_pause_is_collected_once_it_is_resumed(fake: FakeHost) -> None:
    sandbox = await fake.create()
    paused = await fake.node.pause(sandbox.id)
    assert paused.capture is not None
    await fake.world.clock.advance(SETTLE_S)
    assert paused.capture.device_state in fake.world.storage.blobs

    await fake.node.resume(sandbox.id, 60)
    await fake.world.clock.advance(SETTLE_S)

    assert paused.capture.device_state not in fake.world.storage.blobs


@pytest.mark.parametrize("error", [Unavailable("busy"), RuntimeError("what?")])
async def test_a_collection_that_fails_is_not_the_last(fake: FakeHost, error: Exception) -> None:
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    with fake.taps.always("storage.collect", Trip(error=error)):
        await fake.node.delete(sandbox.id)
        await fake.world.clock.advance(SETTLE_S)
    assert len(fake.world.storage.blobs) > 1

    await fake.world.clock.advance(RETRY_S + SETTLE_S)

    assert len(fake.world.storage.blobs) == 1


@pytest.mark.parametrize("step", ["storage.put_blob", "storage.capture_memory", "store.update_sandbox"])
async def test_a_collection_in_the_middle_of_a_pause_takes_nothing_from_it(fake: FakeHost, step: str) -> None:
    sandbox = await fake.create()
    with fake.taps.recorded() as calls:
        await fake.node.pause(sandbox.id)
    await fake.node.resume(sandbox.id, 60)
    number = max(n for n, name in enumerate(calls) if name == step)

    for after in (False, True):
        with fake.taps.recorded():
            slow = fake.taps.trip(number, Trip(after=after))
            pausing = asyncio.create_task(fake.node.pause(sandbox.id))
            await slow.reached.wait()
            await fake.host.collector.collect()
            slow.go.set()
            await pausing
        await fake.host.collector.collect()
        assert (await fake.node.resume(sandbox.id, 60)).state is State.RUNNING


STARTS = ["storage.create_disk", "slots.acquire", "storage.attach_memory", "storage.open_disk", "vmm.restore",
          "storage.fill_memory", "store.insert_sandbox", "guest.init", "store.update_sandbox"]  # fmt: skip


@pytest.mark.parametrize("step", STARTS)
async def test_what_a_create_starts_from_stays_though_its_template_is_deleted_meanwhile(
    fake: FakeHost, step: str
) -> None:
    source = await fake.create()
    await fake.node.snapshot(source.id, "mine")
    await fake.node.delete(source.id)
    with fake.taps.always(step, Trip()) as slow:
        creating = asyncio.create_task(fake.create(template="mine"))
        await slow.reached.wait()
        await fake.node.delete_snapshot("mine")
        await fake.host.collector.collect()
        slow.go.set()
        sandbox = await creating

    assert (await fake.node.pause(sandbox.id)).state is State.PAUSED


@pytest.mark.parametrize("step", STARTS)
async def test_what_children_start_from_stays_though_their_source_is_deleted_meanwhile(
    fake: FakeHost, step: str
) -> None:
    source = await fake.create()
    with fake.taps.recorded() as calls:
        await fake.node.fork(source.id, 1, 300)
    number = max(n for n, name in enumerate(calls) if name == step)
    with fake.taps.recorded():
        slow = fake.taps.trip(number, Trip())
        forking = asyncio.create_task(fake.node.fork(source.id, 1, 300))
        await slow.reached.wait()
        await fake.node.delete(source.id)
        await fake.host.collector.collect()
        slow.go.set()
        (child,) = await forking

    assert child.error is None


async def test_nothing_is_collected_while_a_record_cannot_be_read(world: World) -> None:
    fake = await FakeHost(world).start()
    sandbox = await fake.create()
    await fake.node.pause(sandbox.id)
    following = await fake.crash()
    del world.store._sandboxes[sandbox.id]
    world.store.broken.append(Quarantined("sandbox", sandbox.id, "newer", "{}"))
    before = (world.storage.layers, world.storage.blobs)

    await following.start()
    other = await following.create()
    await following.node.delete(other.id)
    await world.clock.advance(3 * RETRY_S)

    assert (world.storage.layers, world.storage.blobs) == before
    await following.stop()
